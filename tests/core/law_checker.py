"""The checker of laws shared by the law tests and the mutation tests, and noise for very many positions at once."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from moot.core.noise import FIRST_MULTIPLIER, SECOND_MULTIPLIER, THIRD_MULTIPLIER, position_key

SIGNIFICANCE = 1e-6
"""Our draws are fixed by their seeds, so a test's outcome is too; this small, ten thousand checks would not err."""

DRAWS = 400_000


def hash_grid(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> np.ndarray:
    """Hashes [draws, vocab] of each (seed, position), in uint32 arithmetic of this module's own."""
    keys = np.array([position_key(seed, position) for seed, position in zip(seeds, positions, strict=True)])
    low, high = keys[:, :1].astype(np.uint32), keys[:, 1:].astype(np.uint32)
    word = np.arange(vocab_size, dtype=np.uint32)[None, :] ^ low
    word = (word ^ (word >> np.uint32(16))) * np.uint32(FIRST_MULTIPLIER)
    word = (word ^ (word >> np.uint32(15))) + high
    word = word * np.uint32(SECOND_MULTIPLIER)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(THIRD_MULTIPLIER)
    return word ^ (word >> np.uint32(15))


def gumbel_grid(hashes: np.ndarray) -> np.ndarray:
    return -np.log(-np.log((hashes.astype(np.float64) + 0.5) * 2.0**-32))


def follows(counts: Sequence[int] | np.ndarray, law: Sequence[float] | np.ndarray) -> bool:
    """Whether `counts` may come from `law`: nothing impossible occurred, and chi-square does not reject."""
    counts, law = np.asarray(counts), np.asarray(law, dtype=np.float64)
    if counts[law == 0].any():
        return False
    counts, law = counts[law > 0], law[law > 0]
    if len(counts) == 1:
        return True
    return bool(stats.chisquare(counts, counts.sum() * law / law.sum()).pvalue > SIGNIFICANCE)


def total_variation(law: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(abs(a - b) for a, b in zip(law, other, strict=True)) / 2)
