"""Arms of a comparison, how they take turns, and how a table reads what they gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lab.bench.harness.intervals import Interval, ratios
from lab.bench.harness.pages import Table
from moot.commands.common import say as say_aloud

T = TypeVar("T")
Figures = Mapping[str, float]
"""What one turn of one arm gave, by name."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: its name, what differs there, and the arm that it is compared with (empty: none)."""

    name: str
    differs: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""


def in_turns(
    arms: Sequence[Arm],
    take: Callable[[Arm], T],
    repetitions: int,
    warm_up: int = 1,
    say: Callable[[str], None] = say_aloud,
) -> dict[str, list[T]]:
    """What `take` gives of each arm, by its name: once per turn, the order reversed every other turn, so that no arm
    always comes first. The first `warm_up` turns do not count."""
    found: dict[str, list[T]] = {arm.name: [] for arm in arms}
    for turn in range(repetitions + warm_up):
        begin = time.monotonic()
        for arm in arms if turn % 2 == 0 else reversed(arms):
            value = take(arm)
            if turn >= warm_up:
                found[arm.name].append(value)
        name = f"turn {turn + 1 - warm_up} of {repetitions}" if turn >= warm_up else "warm-up"
        say(f"{name} ({time.monotonic() - begin:.1f} s)")
    return found


def calls_in_turns(
    calls: Mapping[str, Callable[[], T]], repetitions: int, warm_up: int = 1, say: Callable[[str], None] = say_aloud
) -> dict[str, list[T]]:
    """As `in_turns`, of arms that are nothing but a call each."""
    return in_turns([Arm(name) for name in calls], lambda arm: calls[arm.name](), repetitions, warm_up, say)


@dataclass(frozen=True, slots=True)
class Runs:
    """The figures of every arm, by its name; those of one place in the lists belong to one turn."""

    of: Mapping[str, Sequence[Figures]]

    def values(self, arm: str, key: str) -> list[float]:
        return [figures[key] for figures in self.of[arm]]

    def interval(self, arm: str, key: str) -> Interval:
        return Interval.of(self.values(arm, key))

    def ratio(self, arm: str, base: str, key: str) -> Interval:
        """Of `arm` to `base`, turn by turn."""
        return ratios(self.values(arm, key), self.values(base, key))


@dataclass(frozen=True, slots=True)
class Column:
    """How a column reads: a figure's median and interval or, with `base`, those of its ratio to the arm of that name.

    `is_plain`: the median alone."""

    title: str
    key: str
    digits: int = 2
    base: str = ""
    is_plain: bool = False

    def cell(self, runs: Runs, arm: str) -> str:
        found = runs.ratio(arm, self.base, self.key) if self.base else runs.interval(arm, self.key)
        return f"{found.median:,.{self.digits}f}" if self.is_plain else found.text(self.digits)


def table_of(runs: Runs, first: str, columns: Sequence[Column]) -> Table:
    """One row for each arm; `first`: what the arms' names are."""
    rows = [[arm, *(column.cell(runs, arm) for column in columns)] for arm in runs.of]
    return Table((first, *(column.title for column in columns)), rows)
