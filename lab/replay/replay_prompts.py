"""Which prompts of a file are recorded, and in which order. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moot.core.errors import ConfigError

MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Categories that Spec-Bench took over from MT-bench with ten prompts each: tables show them as one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`name`: the file's question_id, or its line's number."""

    name: str
    category: str
    text: str

    @property
    def group(self) -> str:
        """What tables call its category."""
        return "mt_bench" if self.category in MT_BENCH else self.category


def read_prompts(path: Path, digits: Sequence[str] = (), limit: int | None = None) -> list[Prompt]:
    """Prompts of a file of JSON lines with `turns` (the first is asked) or `prompt`: those whose name ends in one of
    `digits` (none: all), one of each category in turn, so that whatever learns on the way sees a mix. At most `limit`.

    Raises ConfigError for a file that is none or leaves no prompt.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        prompts = [_prompt(line, number) for number, line in enumerate(lines, 1)]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"no prompts in {path}, which must be JSON lines with `turns` or `prompt` ({error})"
        ) from error
    chosen = in_turn(prompt for prompt in prompts if not digits or prompt.name.endswith(tuple(digits)))[:limit]
    if not chosen:
        raise ConfigError(f"no prompt of {path} has an id that ends in {' or '.join(digits) or 'anything'}")
    return chosen


def _prompt(line: Mapping[str, Any], number: int) -> Prompt:
    text = line["turns"][0] if "turns" in line else line["prompt"]
    return Prompt(str(line.get("question_id", number)), str(line.get("category", "prompt")), str(text))


def in_turn(prompts: Iterable[Prompt]) -> list[Prompt]:
    """One of each group in turn, the largest group first, until all are used up."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    ordered = sorted(groups.values(), key=len, reverse=True)
    deepest = max(map(len, ordered), default=0)
    return [group[depth] for depth in range(deepest) for group in ordered if depth < len(group)]
