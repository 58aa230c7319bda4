"""Medians with a 95 % interval that assumes nothing about the distribution of timings. Pure.

The interval of a median lies between two of the sorted samples: with n independent samples the number below the true
median is binomial(n, 1/2), so the k-th lowest and the k-th highest enclose it with probability 1 - 2 P(B < k).
Source: H. A. David, H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the ends of its 95 % interval (of fewer than six samples: lowest and highest)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Interval:
        """Raises ValueError without samples."""
        if not samples:
            raise ValueError("an interval needs samples")
        ordered = sorted(samples)
        rank = _rank(len(ordered))
        return cls(statistics.median(ordered), ordered[rank], ordered[-1 - rank])

    def text(self, digits: int = 2) -> str:
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    def verdict(self, at_most: float | None = None, at_least: float | None = None) -> str:
        """A bound is missed only when the whole interval lies beyond it."""
        missed = (at_most is not None and self.low > at_most) or (at_least is not None and self.high < at_least)
        return "missed" if missed else "reached"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The interval of the ratio of interleaved pairs: what one pair shares (a slow minute) cancels."""
    return Interval.of([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def interleaved(
    measurements: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1, say: Callable[[str], None] = print
) -> dict[str, list[float]]:
    """Take each measurement once per round, in turns; the order of the turns is reversed every other round."""
    found: dict[str, list[float]] = {name: [] for name in measurements}
    for index in range(rounds + warm_up):
        names = list(measurements)
        for name in names if index % 2 == 0 else reversed(names):
            value = measurements[name]()
            if index >= warm_up:
                found[name].append(value)
        say(f"round {index + 1 - warm_up} of {rounds}" if index >= warm_up else "warm-up")
    return found


def _rank(count: int) -> int:
    """Highest k for which the k-th lowest and k-th highest (from 0) enclose the median with the confidence."""
    rank, tail = 0, 0.5**count
    while rank + 1 <= (count - 1) // 2:
        tail += math.comb(count, rank + 1) * 0.5**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        rank += 1
    return rank
