"""The picture of a page: one column of its table, a bar with its interval for each row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CELL = re.compile(r"(?P<median>-?[\d,.]*\d)(?: ?%)?(?: \((?P<low>-?[\d,.]+)(?: to |-)(?P<high>-?[\d,.]+)\))?")


def read(cell: str) -> tuple[float, float, float] | None:
    """Median and ends that a cell begins with; without ends around it, a number is its own. None: it begins with no
    number."""
    found = _CELL.match(cell)
    if found is None:
        return None
    median, low, high = (float((found[name] or found["median"]).replace(",", "")) for name in ("median", "low", "high"))
    return (median, low, high) if low <= median <= high else (median, median, median)


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Into a matplotlib Figure, of a result's JSON. Raises ValueError where the table has no such column."""
    column, labels = result["header"].index(result["picture"]), result["labels"]
    bars = [(", ".join(row[:labels]), found) for row in result["rows"] if (found := read(row[column])) is not None]
    figure.set_size_inches(9, 1.5 + 0.28 * len(bars))
    axes = figure.subplots()
    for name, (median, low, high) in bars:
        axes.barh(name, median, xerr=[[median - low], [high - median]], color="tab:blue", capsize=2)
    axes.invert_yaxis()
    axes.set(xlabel=result["picture"])
