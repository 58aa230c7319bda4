"""Rotary positions as complex numbers: a head's element pairs lie side by side, and turning them is one product.

Transformers' modules pair element i of a head with element i + dim / 2; `pairing` is the order in which the outputs of
a projection must stand so that pairs become neighbours. Queries and keys share it, so their products are the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK = 512
"""Positions per block. A block is always computed as a whole, so a position's numbers depend on nothing but it."""


def pairing(head_dim: int) -> Tensor:
    half = torch.arange(head_dim // 2)
    return torch.stack((half, half + head_dim // 2), dim=1).flatten()


class Rotary:
    """The turns of each position: complex64 [positions, head_dim / 2], computed block by block when first needed."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._table = self._block(0)

    @property
    def width(self) -> int:
        """Pairs of a head that are turned."""
        return self._table.shape[1]

    def at(self, positions: Sequence[int]) -> Tensor:
        """[positions, 1, head_dim / 2]."""
        highest = max(positions)
        if highest >= len(self._table):
            blocks = range(len(self._table) // _BLOCK, highest // _BLOCK + 1)
            self._table = torch.cat((self._table, *map(self._block, blocks)))
        return self._table[torch.tensor(positions)].unsqueeze(1)

    def _block(self, index: int) -> Tensor:
        positions = torch.arange(index * _BLOCK, (index + 1) * _BLOCK)[None]
        cos, sin = self._module(torch.empty(0, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half])
