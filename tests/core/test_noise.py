"""The noise: fixed answers, uniform, and without any trace of structure in seed, position or token id."""

import math

import numpy as np
import pytest
from scipy import stats

from moot.core.noise import (
    HIGHEST_NOISE,
    LOWEST_NOISE,
    NOISE_RANGE,
    choice_seed,
    gumbel,
    gumbel_of,
    hash32,
    position_key,
)


@pytest.mark.parametrize(
    ("seed", "position", "token_id", "expected"),
    [
        (0, 0, 0, 0x81FB86DF),
        (1, 0, 0, 0x3F82AD8F),
        (0, 1, 0, 0x6E0ADC62),
        (0, 0, 1, 0xC63CF4E0),
        (2**64 - 1, 2**20, 2**18 - 1, 0xBD7026E3),
        (0x0123456789ABCDEF, 4095, 49151, 0x51B9CF89),
        (-1, 7, 2, 0x458847DC),
    ],
)
def test_hash_known_answers(seed: int, position: int, token_id: int, expected: int) -> None:
    """The hash never changes: a text drawn once can be replayed for ever."""
    assert hash32(seed, position, token_id) == expected


def test_gumbel_known_answers() -> None:
    """G is -log(-log((h + 0.5) 2^-32)) of the hash, to the last bits."""
    assert gumbel(0, 0, 1) == pytest.approx(1.3637169484926932, rel=1e-15)
    assert gumbel(0x0123456789ABCDEF, 4095, 49151) == pytest.approx(-0.13261246424563813, rel=1e-14)


def test_choice_seed_known_answers() -> None:
    """The seed of a choice never changes, and choice 0 has not the request's own seed."""
    assert choice_seed(0, 0) == 0x8BA2A620F4693E64
    assert choice_seed(0, 1) == 0xDA6A185EAB523E9A
    assert choice_seed(42, 0) == 0xF5F8B08B8A716E67
    assert choice_seed(-1, 7) == choice_seed(2**64 - 1, 7) == 0x9F5A1F321E29E308


def test_choice_seeds_are_distinct_64_bit_words() -> None:
    """Neighbouring seeds and choices share no seed."""
    seeds = {choice_seed(seed, index) for seed in range(200) for index in range(200)}
    assert len(seeds) == 40_000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds).bit_length() >= 63


def test_noise_is_finite_at_both_ends_and_bounded_as_stated() -> None:
    """Every hash has finite noise, and the bounds that pruning relies on are those of the extreme hashes."""
    assert gumbel_of(0) == pytest.approx(LOWEST_NOISE, rel=1e-15)
    assert gumbel_of(2**32 - 1) == pytest.approx(HIGHEST_NOISE, rel=1e-15)
    assert pytest.approx(26.0, abs=0.01) == NOISE_RANGE


def _bits(words: list[int]) -> np.ndarray:
    return (np.array(words, dtype=np.uint64)[:, None] >> np.arange(32, dtype=np.uint64)) & np.uint64(1)


@pytest.mark.parametrize(("argument", "width"), [(0, 64), (1, 24), (2, 20)], ids=["seed", "position", "token_id"])
def test_avalanche(argument: int, width: int) -> None:
    """Flipping any one bit of seed, position or token id flips every bit of the hash half the time."""
    rng = np.random.default_rng(argument)
    samples = 1500
    points = [
        [int(rng.integers(2**63)) * 2 + int(rng.integers(2)), int(rng.integers(2**20)), int(rng.integers(2**18))]
        for _ in range(samples)
    ]
    before = _bits([hash32(*point) for point in points])
    for bit in range(width):
        flipped = [[*point[:argument], point[argument] ^ (1 << bit), *point[argument + 1 :]] for point in points]
        rate = (before != _bits([hash32(*point) for point in flipped])).mean(axis=0)
        # Five standard deviations of a fair coin: over all 3,456 cells of this test about one in 500 runs would fail,
        # were the points not fixed.
        assert abs(rate - 0.5).max() < 5 * 0.5 / math.sqrt(samples), f"bit {bit}"


@pytest.mark.parametrize("argument", [0, 1, 2], ids=["seed", "position", "token_id"])
def test_uniform_along_each_counter(argument: int) -> None:
    """Counting up in seed, position or token id alone gives uniform hashes, in the high and in the low bits."""
    start = [12345, 678, 910]
    words = np.empty(60_000, dtype=np.int64)
    for step in range(len(words)):
        point = list(start)
        point[argument] += step
        words[step] = hash32(*point)
    for shift in (24, 12, 0):
        counts = np.bincount((words >> shift) & 0xFF, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
    pairs = np.bincount(((words[1:] >> 28) << 4) | (words[:-1] >> 28), minlength=256)
    assert stats.chisquare(pairs).pvalue > 1e-6, "successive hashes are independent"


def test_gumbel_has_the_law_of_its_name() -> None:
    """G is standard Gumbel: Kolmogorov-Smirnov against the distribution function exp(-exp(-x))."""
    noise = [gumbel(7, position, token_id) for position in range(200) for token_id in range(250)]
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-6
    assert stats.pearsonr(noise[:-1], noise[1:]).pvalue > 1e-6


def test_no_two_positions_share_a_key() -> None:
    """Position t of seed s is not position t + d of a neighbouring seed: no stream is another one, shifted."""
    keys = {position_key(seed, position) for seed in range(100) for position in range(500)}
    assert len(keys) == 50_000
