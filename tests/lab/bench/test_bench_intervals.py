"""Medians, ratios and slopes with their intervals."""

from __future__ import annotations

import random

import pytest

from lab.bench.harness.intervals import Interval, ratios, theil_sen


@pytest.mark.parametrize(("count", "trimmed"), [(5, 0), (7, 0), (8, 0), (9, 1), (15, 3), (30, 9)])
def test_the_interval_drops_as_many_samples_as_the_binomial_law_allows(count: int, trimmed: int) -> None:
    """Ends of the 95 % interval of a median are order statistics; the ranks are those of printed tables."""
    samples = [float(index) for index in range(count)]
    random.Random(0).shuffle(samples)
    assert Interval.of(samples) == Interval((count - 1) / 2, trimmed, count - 1 - trimmed)


def test_the_interval_encloses_the_median_as_often_as_it_says() -> None:
    """At least 95 of 100 intervals hold the true median, whatever the distribution (here a skewed one)."""
    generator = random.Random(1)
    held = 0
    for _ in range(2000):
        found = Interval.of([generator.expovariate(1.0) for _ in range(9)])
        held += found.low <= 0.6931 <= found.high
    assert held / 2000 > 0.94


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"at_most": 1.2}, "reached"),
        ({"at_least": 1.0}, "reached"),
        ({"at_most": 1.05}, "not decided"),
        ({"at_least": 1.05, "at_most": 2.0}, "not decided"),
        ({"at_most": 1.0}, "missed"),
        ({"at_least": 1.2, "at_most": 2.0}, "missed"),
    ],
)
def test_a_bound_inside_the_interval_is_not_decided(bounds: dict[str, float], verdict: str) -> None:
    """Noise alone neither fails a measurement nor lets it pass; a clear miss does not pass."""
    assert Interval(1.06, 1.01, 1.1).verdict(**bounds) == verdict


def test_what_a_pair_shares_cancels_in_its_ratio() -> None:
    """A machine that is slow for one whole pair moves no ratio."""
    assert ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Interval(2.0, 2.0, 2.0)


def test_a_slope_is_not_moved_by_single_jumps() -> None:
    """One reading far off changes neither the slope nor, by much, its interval; a growth is not taken for none."""
    xs = [float(x) for x in range(20)]
    steady = [5.0] * 20
    assert theil_sen(xs, [*steady[:-1], 500.0]) == Interval(0.0, 0.0, 0.0)
    found = theil_sen(xs, [3 * x + (x % 2) for x in xs])
    assert found.low > 2.8
    assert found.median == pytest.approx(3.0, abs=0.05)
    with pytest.raises(ValueError, match="three points"):
        theil_sen([1.0, 2.0], [1.0, 2.0])
