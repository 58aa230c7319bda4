"""What lies beside a trained drafter: how it was made and how well it guesses, and the target's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VOCABULARY = "tokenizer.json"
_TOKENIZER = (_VOCABULARY, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json",
              "merges.txt", "tokenizer.model", "added_tokens.json")  # fmt: skip
_MEASURES = {
    "tokens": "tokens measured",
    "agreement_1": "first token right",
    "agreement_2": "second right, if the first is",
    "agreement_3": "third right, if those before are",
    "agreement_4": "fourth right, if those before are",
    "length_4": "mean acceptance length, K = 4",
    "length_8": "mean acceptance length, K = 8",
}


def write_card(
    folder: Path,
    title: str,
    what: str,
    facts: Mapping[str, Any],
    acceptance: Mapping[str, float],
    command: str,
    license_name: str = "",
) -> None:
    """README.md in the folder. `facts`: what decides the result; `acceptance`: as `acceptance.report` gives it."""
    rows = [
        f"| {meaning} | {acceptance[name]:g} | {acceptance[f'sampled_{name}']:g} |"
        for name, meaning in _MEASURES.items()
    ]
    lines = [
        f"# {title}",
        "",
        what,
        "",
        "Made only from text that the target wrote, and licensed as the target is"
        f"{f' ({license_name})' if license_name else ''}; no prompt was asked whose question_id ends in 7.",
        "",
        "| on held-out rows | greedy | sampled (temperature 0.7 to 1.0) |",
        "|---|---|---|",
        *rows,
        "",
        "Sampled: the share of greedy proposals that the target's sample happens to equal.",
        "",
        "| made from | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _flat(facts)),
        "",
        "Made by",
        "",
        f"    {command}",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines))


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in facts.items():
        label = f"{before}{name}".replace("_", " ")
        found += _flat(value, f"{label}: ") if isinstance(value, Mapping) else [(label, value)]
    return found


def copy_tokenizer(folder: Path, target: Path, tokenizer: Any) -> None:
    """The target's tokenizer in `folder`, which then loads like a model, wherever it is moved to."""
    if not target.is_dir():
        tokenizer.save_pretrained(folder)
        return
    for name in _TOKENIZER:
        if (target / name).is_file():
            # A link of an older training would be written through.
            (folder / name).unlink(missing_ok=True)
            shutil.copyfile(target / name, folder / name)
            if name == _VOCABULARY:
                # Written with indents, it is 40 % white space.
                content = json.loads((folder / name).read_text(encoding="utf-8"))
                compact = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
                (folder / name).write_text(compact, encoding="utf-8")
