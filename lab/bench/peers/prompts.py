"""Which prompts of a file are asked: evenly over the categories. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def evenly(lines: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """`count` of them, one of each category in turn, categories in the order of their sizes, then of the file."""
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_category.setdefault(str(line.get("category", "")), []).append(line)
    ordered = sorted(by_category.values(), key=len, reverse=True)
    depth = max((len(group) for group in ordered), default=0)
    spread = [group[index] for index in range(depth) for group in ordered if index < len(group)]
    return spread[:count]


def text_of(line: Mapping[str, Any]) -> str:
    return str(line["turns"][0] if "turns" in line else line["prompt"])
