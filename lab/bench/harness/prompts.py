"""Prompts of measurements: the repository's own small set, or JSON lines from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.harness.pages import BenchConfig
from moot.commands.demo import PROMPTS
from moot.config import option
from moot.core.errors import ConfigError

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


@dataclass(frozen=True, kw_only=True)
class PromptConfig(BenchConfig):
    prompts: Path | None = option(None, help="JSON lines with `turns` (the first is asked) or `prompt`; none: our own")
    held_out: bool = option(False, help="of the file only questions whose id ends in 7")


def held_out(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose `question_id` ends in 7: nothing was trained, and nothing chosen by looking at them."""
    return [line for line in lines if str(line["question_id"]).endswith(HELD_OUT_DIGIT)]


def evenly(lines: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """`count` of them, one of each category in turn, categories in the order of their sizes, then of the file."""
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_category.setdefault(str(line.get("category", "")), []).append(line)
    ordered = sorted(by_category.values(), key=len, reverse=True)
    depth = max((len(group) for group in ordered), default=0)
    return [group[index] for index in range(depth) for group in ordered if index < len(group)][:count]


def name_of(line: Mapping[str, Any], place: int) -> str:
    return f"{line.get('question_id', place)}-{line.get('category', 'prompt')}"


def text_of(line: Mapping[str, Any]) -> str:
    return str(line["turns"][0] if "turns" in line else line["prompt"])


def read_prompts(config: PromptConfig, limit: int, *, over_categories: bool = False) -> dict[str, str]:
    """Name to prompt, at most `limit`, evenly spread over the file or over its categories; without a file our own.

    Raises ConfigError for a file without prompts, and for held-out ones without a file.
    """
    if config.prompts is None:
        if config.held_out:
            raise ConfigError("--held-out needs --prompts")
        return dict(list(OWN.items())[:limit])
    lines: Sequence[Mapping[str, Any]]
    lines = [json.loads(line) for line in config.prompts.read_text().splitlines() if line.strip()]
    lines = held_out(lines) if config.held_out else lines
    if not lines or limit < 1:
        raise ConfigError(f"no prompts in {config.prompts}")
    chosen = evenly(lines, limit) if over_categories else lines[:: max(1, len(lines) // limit)][:limit]
    return {name_of(line, place): text_of(line) for place, line in enumerate(chosen)}


def repeated(prompts: Mapping[str, str], count: int) -> dict[str, str]:
    """`count` prompts: where there are fewer, they are asked again under other names."""
    names = list(prompts)
    return {f"{names[i % len(names)]}#{i}": prompts[names[i % len(names)]] for i in range(count)}
