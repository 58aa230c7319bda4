"""Prompts of measurements: the repository's own small set, or JSON lines from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moot.commands.demo import PROMPTS

OWN: dict[str, str] = PROMPTS | {
    "list": "List the months of the year, each with its number of days, one a line, as `month: days`.",
    "code": (
        "Rewrite this function so that it skips negative numbers, and show the whole function again.\n\n"
        "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
        "    return total / len(numbers)\n"
    ),
    "letter": "Write a polite letter to a neighbour whose dog barks every night.",
}
"""The demo's five and three more: a regular list, a text that repeats its prompt, free writing."""


HELD_OUT_DIGIT = "7"


def held_out(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose `question_id` ends in 7: nothing was trained, and nothing chosen by looking at them."""
    return [line for line in lines if str(line["question_id"]).endswith(HELD_OUT_DIGIT)]


def read_prompts(path: Path | None, limit: int, *, only_held_out: bool = False) -> dict[str, str]:
    """Name to prompt, at most `limit` of them, evenly spread over the file; without a file the repository's own.

    A line has `turns` (the first is asked) or `prompt`; named by `question_id` where it has one, else by its place.
    Raises ValueError for a file without prompts.
    """
    if path is None:
        return dict(list(OWN.items())[:limit])
    lines: Sequence[Mapping[str, Any]] = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if only_held_out:
        lines = held_out(lines)
    if not lines or limit < 1:
        raise ValueError(f"no prompts in {path}")
    chosen = list(enumerate(lines))[:: max(1, len(lines) // limit)][:limit]
    return {
        f"{line.get('question_id', place)}-{line.get('category', 'prompt')}": (
            line["turns"][0] if "turns" in line else line["prompt"]
        )
        for place, line in chosen
    }
