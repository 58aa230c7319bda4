"""What happens to a row of logits before temperature, and the filters after it, on tensors.

Same rules, same order and same float64 arithmetic as `moot.core.sampling`, so that results are equal id by id.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moot.core.history import History, HistoryOnPath
from moot.core.sampling import MASKED, weight_bits
from moot.core.types import SamplingParams

SORTED_AT_ONCE = 256
"""Where this few values are left, sorting costs less than narrowing further."""


def add_bias(row: Tensor, bias: Mapping[int, float]) -> None:
    """Add to `row` (float64 [vocab]) in place; ids outside it are passed over."""
    inside = {token_id: value for token_id, value in bias.items() if 0 <= token_id < row.numel()}
    ids = torch.tensor(list(inside), dtype=torch.int64, device=row.device)
    row[ids] += torch.tensor(list(inside.values()), dtype=torch.float64, device=row.device)


def add_penalties(row: Tensor, params: SamplingParams, history: History | HistoryOnPath) -> None:
    """Penalise seen ids of `row` (float64 [vocab]) in place, as `moot.core.sampling.penalise` does."""
    seen_ids, output_counts = history.seen()
    ids, counts = _to_tensor(seen_ids, row.device), _to_tensor(output_counts, row.device)
    inside = (ids >= 0) & (ids < row.numel())
    ids, counts = ids[inside], counts[inside]
    logits = row[ids]
    logits = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    # Two steps, never a fused multiply-add: its single rounding would differ from the reference.
    decrease = counts.to(torch.float64) * params.frequency_penalty
    logits = logits - decrease
    row[ids] = torch.where(counts > 0, logits - params.presence_penalty, logits)


def keep_top_k(ids: Tensor, scaled: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The first `top_k` of the order (logit descending, id ascending). `ids` int64 ascending, `scaled` float64."""
    if top_k >= scaled.numel():
        return ids, scaled
    # topk promises nothing about which of equal values it returns: only the last value is used.
    cutoff = torch.topk(scaled, top_k).values[-1]
    return _keep_leading(ids, scaled, cutoff, top_k - int((scaled > cutoff).sum()))


def keep_top_p(ids: Tensor, scaled: Tensor, top_p: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The nucleus: the shortest beginning of the order with at least the share `top_p` of the mass given.

    `scaled` is relative to the highest logit. Ids left out before must weigh less than half a unit, or be filtered.
    """
    weights = scaled.exp().mul_(2.0 ** weight_bits(vocab_size)).add_(0.5).floor_()
    target = top_p * float(weights.sum())
    values, above = scaled, 0.0
    low, high = torch.aminmax(values)
    # Narrow down to the values around the crossing: `above` is the mass of everything that ranks before `values`.
    # All sums are exact, so they may be taken in any order.
    while values.numel() > SORTED_AT_ONCE and low < high:
        upper = values > (low + high) / 2
        mass = float(weights[upper].sum())
        if mass + above >= target:
            chosen = upper
        else:
            chosen, above = ~upper, above + mass
        if not bool(chosen.any()):
            break
        values, weights = values[chosen], weights[chosen]
        low, high = torch.aminmax(values)
    values, order = torch.sort(values, descending=True, stable=True)
    cumulated = weights[order].cumsum(0).add_(above)
    crossing = min(int((cumulated < target).sum()), values.numel() - 1)
    cutoff = values[crossing]
    return _keep_leading(ids, scaled, cutoff, crossing + 1 - int((values > cutoff).sum()))


def keep_min_p(ids: Tensor, scaled: Tensor, min_p: float) -> tuple[Tensor, Tensor]:
    """Tokens at least `min_p` times as likely as the likeliest."""
    kept = scaled >= math.log(min_p)
    return ids[kept], scaled[kept]


def first_highest(values: Tensor) -> int:
    """Index of the highest value [n], the lowest such index in a tie: argmax promises no rule for ties."""
    return int((values == values.max()).nonzero()[0, 0])


def only(row: Tensor, allowed: Tensor) -> Tensor:
    """`row` with everything masked except the ids in `allowed` (int64)."""
    result = torch.full_like(row, MASKED)
    result[allowed] = row[allowed]
    return result


def _keep_leading(ids: Tensor, scaled: Tensor, cutoff: Tensor, num_at_cutoff: int) -> tuple[Tensor, Tensor]:
    """All values above `cutoff`, and the first `num_at_cutoff` equal to it."""
    kept = scaled > cutoff
    kept[(scaled == cutoff).nonzero()[:num_at_cutoff, 0]] = True
    return ids[kept], scaled[kept]


def _to_tensor(values: array[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, dtype=np.int64).copy()).to(device)
