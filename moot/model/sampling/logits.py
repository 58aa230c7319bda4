"""Processing of logits before temperature, and the filters after it, on tensors; and the noise in tensor form.

Same rules, same order and same float64 arithmetic as `moot.core.sampling`, so that results are equal id by id. The
noise of `moot.core.noise` for many token ids at once is equal bit by bit on every device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moot.core.history import History, HistoryOnPath
from moot.core.noise import FIRST_MULTIPLIER, MASK32, SECOND_MULTIPLIER, THIRD_MULTIPLIER, position_key
from moot.core.sampling import MASKED, weight_bits
from moot.core.types import SamplingParams


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
    return gumbel_rows(*position_key(seed, position), token_ids)


def gumbel_rows(low: int | Tensor, high: int | Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel` with a key per row: int64 [rows, 1] each, the two words of `position_key`; ids [rows or 1, n]."""
    uniform = _mixed(token_ids ^ low, high).to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def one_minus_uniform(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """1 - u of `token_ids` (int64 [n]) in float32, each within one part in 2^23: enough to tell which ids cannot
    win."""
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


SORTED_AT_ONCE = 256
"""Where this few values are left, sorting costs less than narrowing further."""


def add_bias(row: Tensor, bias: Mapping[int, float]) -> None:
    """Add to `row` (float64 [vocab]) in place; ids outside it are passed over."""
    attached = {token_id: value for token_id, value in bias.items() if 0 <= token_id < row.numel()}
    ids = torch.tensor(list(attached), dtype=torch.int64, device=row.device)
    row[ids] += torch.tensor(list(attached.values()), dtype=torch.float64, device=row.device)


def add_penalties(row: Tensor, params: SamplingParams, history: History | HistoryOnPath) -> None:
    """Penalise seen ids of `row` (float64 [vocab]) in place, as `moot.core.sampling.penalise` does."""
    seen_ids, output_counts = history.seen()
    ids, counts = _to_tensor(seen_ids, row.device), _to_tensor(output_counts, row.device)
    attached = (ids >= 0) & (ids < row.numel())
    ids, counts = ids[attached], counts[attached]
    logits = row[ids]
    logits = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    # Two steps, never a fused multiply-add: its single rounding would differ from the reference.
    decrease = counts.to(torch.float64) * params.frequency_penalty
    logits = logits - decrease
    row[ids] = torch.where(counts > 0, logits - params.presence_penalty, logits)


def top_k_indices(scaled: Tensor, top_k: int) -> Tensor:
    """Ascending int64 indices of the first `top_k` of `scaled` [n] in the order (value descending, index ascending)."""
    if top_k >= scaled.numel():
        return torch.arange(scaled.numel(), device=scaled.device)
    # topk promises nothing about which of equal values it returns: only the last value is used.
    cutoff = torch.topk(scaled, top_k).values[-1]
    return _leading(scaled, cutoff, top_k - int((scaled > cutoff).sum()))


def top_p_indices(scaled: Tensor, top_p: float, vocab_size: int) -> Tensor:
    """The nucleus: the shortest beginning of the same order that holds at least the share `top_p` of the mass given.

    `scaled`: float64 [n], relative to the highest logit. Returns ascending int64 indices. See `moot.core.sampling` for
    the weights: all their sums are exact, so they may be taken in any order and by parts.
    """
    unit = 2.0 ** weight_bits(vocab_size)
    weights = scaled.exp().mul_(unit).add_(0.5).floor_()
    total = float(weights.sum())
    target = top_p * total
    # The nucleus ends before tokens lighter than limit = (1 - top_p) * total / (2 n). With a limit below half a unit
    # they weigh 0; else rounding at most doubles them, and fewer than n hold less than (1 - top_p) * total together.
    candidates = indices_where(scaled >= math.log(0.5 * (1.0 - top_p) * total / unit / scaled.numel()))
    values = scaled[candidates]
    cutoff, num_at_cutoff = _crossing(values, weights[candidates], target)
    return candidates[_leading(values, cutoff, num_at_cutoff)]


def _crossing(values: Tensor, weights: Tensor, target: float) -> tuple[Tensor, int]:
    """The place where the cumulated weights reach `target`: the value there, and how many of the tokens with it are
    needed."""
    above = 0.0  # weight of everything that ranks before `values`
    low, high = torch.aminmax(values)
    while values.numel() > SORTED_AT_ONCE and low < high:
        is_upper = values > low + (high - low) / 2
        upper = indices_where(is_upper)
        if upper.numel() == 0:  # two neighbouring floats are left, and their middle is the upper one
            break
        upper_weights = weights[upper]
        mass = float(upper_weights.sum())
        if above + mass >= target:
            values, weights = values[upper], upper_weights
        else:
            above += mass
            lower = indices_where(~is_upper)
            values, weights = values[lower], weights[lower]
        low, high = torch.aminmax(values)
    values, order = torch.sort(values, descending=True, stable=True)
    cumulated = weights[order].cumsum(0).add_(above)
    crossing = int((cumulated < target).sum())
    cutoff = values[crossing]
    return cutoff, crossing + 1 - int((values > cutoff).sum())


def min_p_indices(scaled: Tensor, min_p: float) -> Tensor:
    """Tokens at least `min_p` times as likely as the likeliest, as ascending int64 indices into `scaled` [n]."""
    return indices_where(scaled >= math.log(min_p))


def indices_where(mask: Tensor) -> Tensor:
    """Ascending int64 indices of the true elements of `mask` [n]."""
    if mask.device.type == "cpu":  # the same, several times faster
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]


def first_highest(values: Tensor) -> int:
    """Index of the highest value [n], the lowest such index in a tie: torch's argmax promises no rule for ties."""
    return int(indices_where(values == values.max())[0])


def first_highest_rows(rows: Tensor) -> Tensor:
    """`first_highest` of each row [rows, n], int64 [rows]. In a row with NaN the index of a NaN."""
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        # NumPy's argmax promises the first of equal values, and the first NaN.
        return torch.from_numpy(np.asarray(np.argmax(rows.numpy(), axis=1)))
    highest = rows.amax(dim=1, keepdim=True)
    is_highest = (rows == highest) | rows.isnan()
    numbers = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(is_highest, numbers, rows.shape[1]).amin(dim=1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows of `parts`, each [rows, ...] of one dtype; a view of them where they follow one another in memory."""
    first, total = parts[0], sum(part.shape[0] for part in parts)
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if not part.is_contiguous() or part.untyped_storage().data_ptr() != storage or part.storage_offset() != offset:
            return torch.cat(list(parts))
        offset += part.numel()
    return first.as_strided((total, *first.shape[1:]), (first.shape[1:].numel(), *first.stride()[1:]))


def only(row: Tensor, allowed: Tensor) -> Tensor:
    """`row` with everything masked except the ids in `allowed` (int64)."""
    result = torch.full_like(row, MASKED)
    result[allowed] = row[allowed]
    return result


def _leading(values: Tensor, cutoff: Tensor, num_at_cutoff: int) -> Tensor:
    """Indices of all values above `cutoff` and of the first `num_at_cutoff` equal to it, ascending."""
    equal = indices_where(values == cutoff)
    if num_at_cutoff == equal.numel():
        return indices_where(values >= cutoff)
    kept = values > cutoff
    kept[equal[:num_at_cutoff]] = True
    return indices_where(kept)


def _to_tensor(values: array[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, dtype=np.int64).copy()).to(device)
