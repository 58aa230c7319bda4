"""The noise of the one sampler: a number for every (seed, position, token id), with no generator state anywhere.

Construction: a counter-based hash. The 64-bit key of a position is mixed from seed and position by xor-shift-multiply
rounds as in SplitMix64 (Steele, Lea, Flood, 2014). The token id then passes through a 32-bit xor-shift-multiply
permutation with one half of the key xored in before it and the other half added between its rounds, as in the finalizer
of MurmurHash3 with one more round (Appleby, 2011). The multipliers are our own: random odd numbers below 2^31, chosen
by measured avalanche. Below 2^31, because the product of two 32-bit words then stays below 2^63 and signed 64-bit
arithmetic, which is all that tensors offer everywhere, never overflows.

Changing anything here changes every sampled text: known answers are fixed in the tests.
"""

from __future__ import annotations

import math

MASK32 = 0xFFFF_FFFF
MASK64 = 0xFFFF_FFFF_FFFF_FFFF

_MIX64_FIRST = 0x9FB2_1C65_1E98_DF25
_MIX64_SECOND = 0xD6E8_FEB8_6659_FD93
_POSITION_STEP = 0xB5AD_4ECE_DA1C_E2A9
_CHOICE_STEP = 0xA3EC_647B_59F5_1D4D
_CHOICE_DOMAIN = 0x6D6F_6F74_2D63_6869

FIRST_MULTIPLIER = 0x7945_CB79
SECOND_MULTIPLIER = 0x7CEC_288F
THIRD_MULTIPLIER = 0x629F_0279

HIGHEST_NOISE = -math.log(-math.log1p(-(2.0**-33)))
"""G of the largest hash, 33 ln 2 = 22.87 nats: no noise is above it."""
LOWEST_NOISE = -math.log(33 * math.log(2.0))
"""G of hash 0, -3.13 nats: no noise is below it."""
NOISE_RANGE = HIGHEST_NOISE - LOWEST_NOISE
"""26.0 nats: a token further than this below the best log-probability never wins."""


def _mix64(word: int) -> int:
    word ^= word >> 32
    word = (word * _MIX64_FIRST) & MASK64
    word ^= word >> 29
    word = (word * _MIX64_SECOND) & MASK64
    return word ^ (word >> 32)


def choice_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice `index` of a request whose seed is `seed` (any integer, taken modulo 2^64)."""
    return _mix64((_mix64((seed & MASK64) ^ _CHOICE_DOMAIN) + (index + 1) * _CHOICE_STEP) & MASK64)


def position_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words that key the hash of all token ids at `position`. `seed` is taken modulo 2^64."""
    key = _mix64((_mix64(seed & MASK64) + (position + 1) * _POSITION_STEP) & MASK64)
    return key & MASK32, key >> 32


def hash32(seed: int, position: int, token_id: int) -> int:
    """The 32-bit hash of (seed, position, token id), uniform on 0 .. 2^32 - 1. 0 <= token_id < 2^32."""
    low, high = position_key(seed, position)
    word = token_id ^ low
    word ^= word >> 16
    word = (word * FIRST_MULTIPLIER) & MASK32
    word ^= word >> 15
    word = (word + high) & MASK32
    word = (word * SECOND_MULTIPLIER) & MASK32
    word ^= word >> 16
    word = (word * THIRD_MULTIPLIER) & MASK32
    return word ^ (word >> 15)


def gumbel_of(hash_value: int) -> float:
    """Standard Gumbel noise -log(-log(u)) of u = (hash + 0.5) * 2^-32; finite for every 32-bit hash."""
    return -math.log(-math.log((hash_value + 0.5) * 2.0**-32))


def gumbel(seed: int, position: int, token_id: int) -> float:
    """G(seed, t, x) of the sampler: standard Gumbel noise in nats."""
    return gumbel_of(hash32(seed, position, token_id))
