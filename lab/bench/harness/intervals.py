"""Medians with a 95 % interval that assumes nothing about the distribution of timings. Pure.

The interval of a median lies between two of the sorted samples: with n independent samples the number below the true
median is binomial(n, 1/2), so the k-th lowest and the k-th highest enclose it with probability 1 - 2 P(B < k).
Source: H. A. David, H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
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

    @property
    def error(self) -> tuple[float, float]:
        """How far the ends lie below and above the median."""
        return self.median - self.low, self.high - self.median

    def text(self, digits: int = 2) -> str:
        """The median, and the ends where they read otherwise."""
        median, low, high = (f"{value:,.{digits}f}" for value in (self.median, self.low, self.high))
        return median if low == median == high else f"{median} ({low} to {high})"

    def verdict(self, at_most: float | None = None, at_least: float | None = None) -> str:
        """What the samples say of bounds: an interval on both sides of one decides nothing."""
        if (at_most is not None and self.low > at_most) or (at_least is not None and self.high < at_least):
            return "missed"
        is_reached = (at_most is None or self.high <= at_most) and (at_least is None or self.low >= at_least)
        return "reached" if is_reached else "not decided"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The interval of the ratio of interleaved pairs: what one pair shares (a slow minute) cancels."""
    return Interval.of([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> Interval:
    """Slope of ys over xs: the median of the slopes of all pairs, which single jumps do not move, with its 95 %
    interval from Kendall's statistic (P. K. Sen, 1968). xs differ. Raises ValueError for fewer than three points."""
    count = len(xs)
    if count < 3:
        raise ValueError("a slope with an interval needs three points")
    slopes = sorted(
        (ys[late] - ys[early]) / (xs[late] - xs[early]) for early, late in itertools.combinations(range(count), 2)
    )
    half = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - half) / 2))
    return Interval(statistics.median(slopes), slopes[low], slopes[-1 - low])


def _rank(count: int) -> int:
    """Highest k for which the k-th lowest and k-th highest (from 0) enclose the median with the confidence."""
    rank, tail = 0, 0.5**count
    while rank + 1 <= (count - 1) // 2:
        tail += math.comb(count, rank + 1) * 0.5**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        rank += 1
    return rank
