"""The rows of a step: what they are worth, and what a slow machine does to that."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.stepping.step_price import StepPrice
from moot.core.stepping.step_times import StepTimes

GPU = {rows: 0.030 + 0.0002 * max(rows - 64, 0) for rows in (1, 16, 32, 64, 65, 128, 256, 512)}
SIZES = (1, 2, 3, 4, 8)


def price_of(seconds: Callable[[int], float], tokens_per_session: float = 1.0, sessions: int = 2) -> StepPrice:
    price = StepPrice(StepTimes({rows: seconds(rows) for rows in SIZES}))
    for _ in range(200):
        price.stepped(sessions, sessions, round(tokens_per_session * sessions), seconds(sessions))
    return price


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0, 0.01), min_size=5, max_size=5),
)
def test_the_rows_taken_are_the_best_there_are(chances: list[list[float]], slopes: list[float]) -> None:
    """Against every other choice of leading nodes: tokens less the tokens that the longer step costs."""
    offers = [sorted(one, reverse=True) for one in chances]
    times = dict(zip(SIZES, itertools.accumulate(slopes, initial=0.01), strict=False))
    price = price_of(lambda rows: times[min(rows, 8)], sessions=len(offers))
    rate = price.delivered(len(offers))

    def worth(counts: tuple[int, ...]) -> float:
        tokens = sum(sum(offer[:count]) for offer, count in zip(offers, counts, strict=True))
        return tokens - rate * price.times.seconds(len(offers) + sum(counts))

    taken = tuple(price.take(offers, len(offers), 100))
    best = max(map(worth, itertools.product(*[range(len(offer) + 1) for offer in offers])))
    assert worth(taken) == pytest.approx(best, abs=1e-9)


def test_free_rows_are_all_taken_and_a_full_verifier_takes_none() -> None:
    """No length is set anywhere: 32 sessions on 64 free rows verify what they have, 64 take what is worth a longer step
    and nothing that is not."""
    offers = [[0.35, 0.1]] * 32
    price = StepPrice(StepTimes(GPU))
    for _ in range(100):
        price.stepped(32, 32, 32, 0.030)
    assert sum(price.take(offers, 32, 1000)) == 32
    assert price.price == pytest.approx(32 / 0.030 * 0.0002)
    assert price.take([[0.35, 0.1]] * 64, 64, 1000) == [0] * 64
    assert price.take([[0.8, 0.3]] * 64, 64, 1000) == [1] * 64


def test_no_more_nodes_than_fit_are_taken() -> None:
    """The limit of a forward pass holds whatever a row is worth, and the best nodes are those that fit."""
    price = StepPrice(StepTimes(GPU))
    assert price.take([[0.9, 0.8], [0.95, 0.1]], 2, 2) == [1, 1]
    assert price.take([[0.5], [0.5], [0.5]], 3, 2) == [1, 1, 0]
    assert price.take([[0.5]], 1, 0) == [0]


def rows_around_a_slow_moment(seed: int) -> tuple[int, int, int]:
    """Rows that the same drafts get before, while every step takes three times as long, unevenly, and afterwards."""
    source = random.Random(seed)
    price = StepPrice(StepTimes({1: 0.037, 16: 0.037, 32: 0.077, 64: 0.157}))
    drafts = [[sorted([source.random() for _ in range(4)], reverse=True) for _ in range(8)] for _ in range(50)]
    turns = itertools.cycle(drafts)

    def rows_after(num_steps: int, slower: float) -> int:
        for offers in itertools.islice(turns, num_steps):
            count = sum(price.take(offers, 8, 1000))
            seconds = slower * source.uniform(0.8, 1.2) * (0.037 + 0.0025 * max(count - 8, 0))
            price.stepped(8, 8 + count, 8 + round(0.3 * count), seconds)
        return sum(sum(price.take(one, 8, 1000)) for one in drafts)

    return rows_after(400, 1.0), rows_after(45, 3.0), rows_after(100, 1.0)


def test_a_slow_moment_of_the_machine_changes_no_decision() -> None:
    """Another process takes the cores for 5 s: while it does and afterwards the same drafts get the same rows, within
    one in twenty of eight such moments."""
    before, during, after = (sum(rows) for rows in zip(*map(rows_around_a_slow_moment, range(8)), strict=True))
    assert before > 8 * 4 * 50
    assert during == pytest.approx(before, rel=0.05)
    assert after == pytest.approx(before, rel=0.05)


def test_step_times_follow_a_machine_that_has_another_shape() -> None:
    """What was measured at start is a beginning: after some thousand steps the price of a row is what steps say."""
    times = StepTimes({1: 0.030, 8: 0.030, 16: 0.031})
    source = random.Random(1)
    for _ in range(6000):
        rows = source.choice((1, 8, 16))
        times.observe(rows, {1: 0.030, 8: 0.030, 16: 0.060}[rows] * source.uniform(0.9, 1.1))
    assert times.seconds(16) / times.seconds(8) == pytest.approx(2.0, rel=0.1)
    assert times.seconds(1) <= times.seconds(8) <= times.seconds(16)


@pytest.mark.parametrize("measured", [{1: 0.03}, {0: 0.03, 4: 0.03}, {1: 0.0, 4: 0.03}])
def test_step_times_need_sizes(measured: dict[int, float]) -> None:
    """One size has no slope, and a step without rows or without time is no step."""
    with pytest.raises(ValueError, match="step times"):
        StepTimes(measured)
