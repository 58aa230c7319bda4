"""The noise of `moot.core.noise` for many token ids at once, equal bit by bit on every device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moot.core.noise import FIRST_MULTIPLIER, MASK32, SECOND_MULTIPLIER, THIRD_MULTIPLIER, position_key


def hash32(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """32-bit hashes of `token_ids` (int64, any shape, 0 <= id < 2^32) in an int64 tensor of the same shape."""
    low, high = position_key(seed, position)
    return _mixed(token_ids ^ low, high)


def _mixed(word: Tensor, high: int | Tensor) -> Tensor:
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


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """G(seed, position, id) of `token_ids` (int64) in float64, within 2 ulp (of max(1, |G|)) of the reference."""
    return _gumbel_of(hash32(seed, position, token_ids))


def gumbel_rows(low: Tensor, high: Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel` with a key per row: int64 [rows, 1] each, the two words of `position_key`; ids [rows or 1, n]."""
    return _gumbel_of(_mixed(token_ids ^ low, high))


def _gumbel_of(hashes: Tensor) -> Tensor:
    uniform = hashes.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def one_minus_uniform(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """1 - u of `token_ids` (int64 [n]) in float32, each within one part in 2^23: enough to tell who cannot win."""
    if token_ids.device.type == "cpu":
        # Unsigned 32-bit arithmetic, which only NumPy offers here, is several times faster than the masked 64-bit one.
        words = _hash32_numpy(seed, position, token_ids.numpy())
        upper = torch.from_numpy((~words).astype(np.float32))
    else:
        upper = (MASK32 - hash32(seed, position, token_ids)).to(torch.float32)
    return upper.add_(0.5).mul_(2.0**-32)


def _hash32_numpy(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """`hash32` on uint32, whose products wrap around by definition."""
    low, high = position_key(seed, position)
    word = token_ids.astype(np.uint32)
    word ^= np.uint32(low)
    word ^= word >> np.uint32(16)
    word *= np.uint32(FIRST_MULTIPLIER)
    word ^= word >> np.uint32(15)
    word += np.uint32(high)
    word *= np.uint32(SECOND_MULTIPLIER)
    word ^= word >> np.uint32(16)
    word *= np.uint32(THIRD_MULTIPLIER)
    word ^= word >> np.uint32(15)
    return word
