"""The parts of a decoder layer besides products and attention, each a function of rows.

No function lets a row's numbers depend on the other rows. Where torch splits an element-wise operation among threads,
or vectors end, elements are rounded by other code; so operations that are not exact take whole rows, few per call.

Rotary positions are complex numbers: a head's element pairs lie side by side, and turning them is one product.
Transformers' modules pair element i of a head with element i + dim / 2; `pairing` is the order in which the outputs of
a projection must stand so that pairs become neighbours. Queries and keys share it, so their products are the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moot.model.decoder.products import Product

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

    def at(self, positions: Sequence[int]) -> Tensor:
        """The turns at these positions, [positions, 1, head_dim / 2]."""
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


_SERIAL_ELEMENTS = 32767
"""torch splits an element-wise operation among threads beyond this many elements."""


def in_row_parts(operation: Callable[..., Tensor], width: int, *operands: Tensor) -> Tensor:
    """`operation(*operands)`, whose results have `width` elements a row, in calls that one thread computes."""
    rows, per_call = operands[0].shape[0], max(1, _SERIAL_ELEMENTS // width)
    if rows <= per_call:
        return operation(*operands)
    return torch.cat([operation(*parts) for parts in zip(*(x.split(per_call) for x in operands), strict=True)])


class Norm:
    """Root-mean-square normalisation as one layer normalisation, of x beside -x.

    The mean of x and -x is zero and their variance is the mean square of x, so layer normalisation of both does what
    half a dozen element-wise operations would, in float32 throughout: scale x / sqrt(mean(x^2) + epsilon).
    """

    __slots__ = ("_twice", "epsilon", "scale", "width")

    def __init__(self, scale: Tensor, epsilon: float) -> None:
        self.width = scale.shape[0]
        self.scale = scale.detach().float()
        self.epsilon = epsilon
        self._twice = torch.cat((scale, scale)).detach()

    def __call__(self, both: Tensor) -> Tensor:
        """The normalised rows. both: [rows, 2 width], x beside -x. Returns [rows, width]."""
        return functional.layer_norm(both, (2 * self.width,), self._twice, None, self.epsilon)[:, : self.width]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Root-mean-square normalisation of each query and key head, before it is turned. scale: float32 [heads, dim]."""

    scale: Tensor
    epsilon: float

    def __call__(self, heads: Tensor) -> Tensor:
        return functional.rms_norm(heads, heads.shape[-1:], None, self.epsilon).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `queries_keys_values` gives a row's query heads and key heads, in pairs, and its value heads."""

    before_attention: Norm
    queries_keys_values: Product
    head_norm: HeadNorm | None
    query_scale: float
    attended: Product
    before_mlp: Norm
    gate_up: Product
    down: Product
    window: int | None


@dataclass(frozen=True, slots=True)
class HeadShape:
    query_heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def turned(self) -> int:
        """Number of heads that are turned: queries and keys."""
        return self.query_heads + self.kv_heads


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a whole decoder. embedding: bfloat16 [vocab, width]."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    last_norm: Norm
    head: Product
    rotary: Rotary
    heads: HeadShape


def turned_heads(
    projected: Tensor, turns: Tensor, shape: HeadShape, norm: HeadNorm | None, query_scale: float
) -> Tensor:
    """Query and key heads, float32 [rows, heads, dim], of a projection [rows, outputs] turned to their positions."""
    rows = projected.shape[0]
    heads = projected[:, : shape.turned * shape.dim].float().view(rows, shape.turned, shape.dim)
    if norm is not None:
        heads = norm(heads)
    if query_scale != 1.0:
        heads[:, : shape.query_heads].mul_(query_scale)
    pairs = torch.view_as_complex(heads.view(rows, shape.turned, shape.dim // 2, 2))
    turned = in_row_parts(torch.mul, shape.turned * shape.dim // 2, pairs, turns)
    return torch.view_as_real(turned).view(rows, shape.turned, shape.dim)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side, [rows, 2 width] to [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    active = in_row_parts(functional.silu, gate.shape[-1], gate)
    return torch.mul(active, up, out=active)
