"""Makes docs/cases.md: how many tests keep which case. Run it after a test has got or lost a case number:

    python tests/integration/cases_table.py
    python tests/integration/cases_table.py C09 ...    only prints the tests of these cases

A test keeps a case when its docstring, or the head of its file, names it (`C09`). No test is imported for it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

_NUMBER = re.compile(r"\bC\d\d\b")
ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "cases.md"

CASES = {
    "C01": "drafting on or off: the same text, also at ties",
    "C02": "sampled text follows the target's law, whatever the draft",
    "C03": "no draft token is committed unchecked",
    "C04": "rows of a batch do not mix",
    "C05": "the cache is as if rejected tokens had never been",
    "C06": "late, doubled and foreign answers are dropped and counted",
    "C07": "ids in the padding of a vocabulary are refused",
    "C08": "another tokenizer is refused, with both fingerprints",
    "C09": "text, ids, logprobs and usage end at the stop",
    "C10": "an end token inside a draft; ignore_eos",
    "C11": "max_tokens is exact",
    "C12": "min_tokens masks ends inside the draft",
    "C13": "no beginning of a stop string leaks into a stream",
    "C14": "characters of many bytes come whole",
    "C15": "the usage chunk comes when asked for",
    "C16": "logprobs are the target's, one per token",
    "C17": "bias and filters hold at every position",
    "C18": "temperatures at and near 0, and large ones",
    "C19": "one bad parameter stops nothing",
    "C20": "garbage from a drafter is dropped, counted, ejected",
    "C21": "a drafter past its context abstains",
    "C22": "prompts that are too long; health meanwhile",
    "C23": "empty and odd prompts",
    "C24": "clients that go leave nothing",
    "C25": "SIGTERM with running streams",
    "C26": "dead and not-ready pods, rolling restarts",
    "C27": "messages above 4 MiB, and above the limit",
    "C28": "replies of the record server go to their own request",
    "C29": "the record server down, frozen, full, flushed",
    "C30": "counters add up and are never absurd",
    "C31": "an upgrade does not undo the autoscaler",
    "C32": "speculation never makes a busy server slower",
    "C33": "a vote is no verification; silence is no vote",
    "C34": "few, late, dissenting and dead drafters",
}

HEAD = """# Known kinds of mistakes, and the tests that keep them out

Each case is a kind of mistake that people met who serve models with speculative decoding. A test keeps a case when its
docstring, or the head of its file, names it. `python tests/integration/cases_table.py` makes this page;
with a number it prints the tests of that case.

| case | right | tests |
|---|---|---|
"""


def keepers() -> dict[str, list[str]]:
    """Case number to `file::test`, in the order of files and lines; to the file alone where only its head names it."""
    found: dict[str, list[str]] = {case: [] for case in CASES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if not _NUMBER.search(text):
            continue
        module = ast.parse(text)
        named: set[str] = set()
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for case in _named_in(node):
                    found.setdefault(case, []).append(f"{name}::{node.name}")
                    named.add(case)
        for case in _named_in(module):
            if case not in named:
                found.setdefault(case, []).append(name)
    return found


def _named_in(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> list[str]:
    return list(dict.fromkeys(_NUMBER.findall(ast.get_docstring(node) or "")))


def table(by_case: dict[str, list[str]]) -> str:
    return HEAD + "".join(f"| {case} | {title} | {len(by_case[case])} |\n" for case, title in CASES.items())


if __name__ == "__main__":
    kept = keepers()
    if asked := sys.argv[1:]:
        print("\n".join(test for case in asked for test in kept[case]))
    else:
        TABLE.write_text(table(kept))
