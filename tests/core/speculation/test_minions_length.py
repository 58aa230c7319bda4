"""Minions' length: acceptance and cost fixed, and K goes where a token costs least."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from moot.core.speculation.length import Load, MinionsLength, RoundSample
from moot.core.speculation.policy import SpeculationOptions, make_policy

MOST = 8
WINDOW = 24


def per_second(chance: float, row: float, length: int) -> float:
    """Expected tokens per second at a fixed K: a token is right with `chance`, a step of K takes 1 + K `row`."""
    return sum(chance**depth for depth in range(length + 1)) / (1 + row * length)


def drive(policy: MinionsLength, chance: float, row: float, rounds: int, seed: int) -> tuple[float, list[int]]:
    """Tokens per second of all but the first quarter, and the lengths."""
    source = random.Random(seed)
    tokens = seconds = 0.0
    lengths: list[int] = []
    for number in range(rounds):
        length = policy.next_length(Load())
        accepted = next((depth for depth in range(length) if source.random() >= chance), length)
        took = (1 + row * length) * source.uniform(0.9, 1.1)
        policy.observe(RoundSample(length, length, accepted, took))
        lengths.append(length)
        if number >= rounds // 4:
            tokens += accepted + 1
            seconds += took
    return tokens / seconds, lengths


@pytest.mark.parametrize("chance", [0.9, 0.7, 0.5, 0.3])
@pytest.mark.parametrize("row", [0.0, 0.02, 0.1])
def test_it_comes_close_to_the_best_fixed_length(chance: float, row: float) -> None:
    """Twelve worlds, from drafts that are nearly free to rows that cost a tenth of a step: at least 0.93 of the best K
    of one to eight, though it only ever compares two neighbours by 24 rounds each."""
    best = max(per_second(chance, row, length) for length in range(1, MOST + 1))
    found = mean(drive(MinionsLength(4, MOST), chance, row, 6000, seed)[0] for seed in range(5))
    assert 0.93 * best < found < 1.02 * best


def test_a_window_is_settled_before_k_moves() -> None:
    """K stays for a whole window; rounds of an older K that were still under way, and rounds that the end of a request
    cut short, neither fill a window nor count in it."""
    policy = MinionsLength(4, MOST)
    for _ in range(WINDOW - 1):
        policy.observe(RoundSample(4, 4, 1, 1.0))
        policy.observe(RoundSample(3, 3, 0, 99.0))
        policy.observe(RoundSample(4, 4, 0, 99.0, is_cut=True))
        assert policy.next_length(Load()) == 4
    policy.observe(RoundSample(4, 4, 1, 1.0))
    assert policy.next_length(Load()) == 5
    for _ in range(WINDOW):
        policy.observe(RoundSample(4, 4, 1, 99.0))
    for _ in range(WINDOW):
        policy.observe(RoundSample(5, 5, 1, 1.5))
    assert policy.next_length(Load()) == 4


def test_it_stays_in_range() -> None:
    """Never above the greatest, never below one: it cannot switch drafting off."""
    for chance, row in ((1.0, 0.0), (0.0, 1.0)):
        lengths = drive(MinionsLength(4, MOST), chance, row, 2000, 1)[1]
        assert set(lengths) <= set(range(1, MOST + 1))
    assert set(drive(MinionsLength(1, 1), 0.5, 0.1, 100, 1)[1]) == {1}


def test_all_requests_of_a_router_share_it() -> None:
    """Requests are shorter than it takes to find a length: what one has learned the next begins with."""
    pool = make_policy(SpeculationOptions(length="minions", num_speculative_tokens=MOST))
    first, second = (pool.open(["a"]) for _ in range(2))
    assert first._length is second._length is pool.minions


@pytest.mark.parametrize(("start", "most", "window"), [(0, 8, 24), (9, 8, 24), (4, 8, 0)])
def test_sizes_that_make_no_policy_are_refused(start: int, most: int, window: int) -> None:
    """A start outside the range, and a window without rounds."""
    with pytest.raises(ValueError, match="start must be"):
        MinionsLength(start, most, window)
