"""Cases for the checks behind batch-invariant mode: the same rows beside other rows, compared bit by bit.

Rounding that differs in the last bits of a float32 sum is mostly hidden when the result is rounded to bfloat16, and
then shows once in ten thousand tokens. So the inputs here are made to cancel: every sum is exactly zero, and what comes
out is nothing but the rounding of its partial sums. Any difference in their order shows in most elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moot.model.rows import TILE_ROWS, Padding

MOST_OUTPUTS = 4096
"""Larger weights (the vocabulary's) are checked on this many of their outputs."""


class Case:
    """A computation of TILE_ROWS rows; `compute(index)` gives the rows with these indices in one call.

    `most_rows`: rows that a call may have, where more than TILE_ROWS come in multiples of it.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], most_rows: int = TILE_ROWS) -> None:
        self._compute = compute
        self._whole = compute(torch.arange(TILE_ROWS))
        self._most_rows = most_rows

    def holds(self, padding: Padding) -> bool:
        """Whether every count of rows, at the start and at the end of the tile, gives the whole tile's bits."""
        if padding.rows(TILE_ROWS) != TILE_ROWS:
            return False
        for count in range(1, TILE_ROWS + 1):
            for first in {0, TILE_ROWS - count}:
                index = torch.arange(first, first + padding.rows(count)).clamp_max(first + count - 1)
                if not torch.equal(self._compute(index)[:count], self._whole[first : first + count]):
                    return False
        return all(self._holds_beside(count) for count in range(2 * TILE_ROWS, self._most_rows + 1, TILE_ROWS))

    def _holds_beside(self, count: int) -> bool:
        """Whether the tile's rows come out alike at the start and at the end of a call of `count` rows."""
        index = torch.arange(count) % TILE_ROWS
        rows = self._compute(index)
        return torch.equal(rows[:TILE_ROWS], self._whole) and torch.equal(rows[-TILE_ROWS:], self._whole)


def of_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> Callable[[Tensor], Tensor]:
    """The computation of a `Case`: `function` of the rows that are asked for."""

    @torch.inference_mode()
    def compute(index: Tensor) -> Tensor:
        return function(rows[index])

    return compute


def first_holding(paddings: Sequence[Padding], cases: Sequence[Case]) -> Padding | None:
    return next((padding for padding in paddings if all(case.holds(padding) for case in cases)), None)


def cancelling(
    left: Sequence[int], right: Sequence[int], size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Two tensors [*left, size] and [*right, size] whose products over the last axis are exactly zero."""
    half = size // 2
    order = torch.randperm(half * 2, generator=generator)
    x, y = torch.randn(*left, half, generator=generator), torch.randn(*right, half, generator=generator)
    odd = size - half * 2
    first = nn.functional.pad(torch.cat((x, -x), -1)[..., order], (0, odd))
    return first, nn.functional.pad(torch.cat((y, y), -1)[..., order], (0, odd))


def cancelling_attention(
    kv_heads: int, group: int, slots: int, dim: int, cancel_scores: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that are nothing but rounding, scaled up; or equal scores over values that cancel. bfloat16.

    Queries [kv_heads, TILE_ROWS, group, dim], keys and values [kv_heads, slots, dim].
    """
    if cancel_scores:
        queries, keys = cancelling((kv_heads, TILE_ROWS, group), (kv_heads, slots), dim, generator)
        queries *= 2.0**20
        values = torch.randn(kv_heads, slots, dim, generator=generator)
    else:
        queries, keys = torch.zeros(kv_heads, TILE_ROWS, group, dim), torch.zeros(kv_heads, slots, dim)
        half = torch.randn(kv_heads, slots // 2, dim, generator=generator)
        values = torch.cat((half, -half), dim=1)[:, torch.randperm(slots, generator=generator)]
    return queries.bfloat16(), keys.bfloat16(), values.bfloat16()
