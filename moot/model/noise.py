"""The noise of `moot.core.noise` for many token ids at once, equal bit by bit on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moot.core.noise import FIRST_MULTIPLIER, MASK32, SECOND_MULTIPLIER, THIRD_MULTIPLIER, position_key


def hash32(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """32-bit hashes of `token_ids` (int64, any shape, 0 <= id < 2^32) in an int64 tensor of the same shape."""
    low, high = position_key(seed, position)
    word = token_ids ^ low
    word ^= word >> 16
    # Words stay below 2^32 and multipliers below 2^31: no product overflows a signed 64-bit integer.
    word.mul_(FIRST_MULTIPLIER).bitwise_and_(MASK32)
    word ^= word >> 15
    word.add_(high).bitwise_and_(MASK32)
    word.mul_(SECOND_MULTIPLIER).bitwise_and_(MASK32)
    word ^= word >> 16
    word.mul_(THIRD_MULTIPLIER).bitwise_and_(MASK32)
    word ^= word >> 15
    return word


def gumbel_of(hashes: Tensor) -> Tensor:
    """Float64 noise -log(-log(u)), u = (hash + 0.5) * 2^-32, of int64 hashes."""
    uniform = hashes.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """G(seed, position, id) of `token_ids` (int64) in float64, within 2 ulp (of max(1, |G|)) of the reference."""
    return gumbel_of(hash32(seed, position, token_ids))


def lowest_hash_reaching(noise: float) -> int:
    """A hash such that every hash with noise of at least `noise` nats is at or above it (a few below reach it not)."""
    # The float64 error of u is far below one hash step; two steps below is safe on every libm.
    return max(0, math.floor(math.exp(-math.exp(-noise)) * 2.0**32) - 2)
