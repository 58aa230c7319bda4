"""The steps of a recurrent head: by its own modules, or in the layout that takes the least time on this CPU.

A step for one request does little and waits for memory, so the fast layout reads less. What the known tokens add to the
gated layer is looked up instead of computed, since the layer's input is a sum over its parts. Weights are one byte a
number: few rows stream half the memory of bfloat16. Each output has a scale, and its numbers are multiples of it. A
guess may be off by that much; the target's own numbers must not, so none of its products is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from moot.drafters.attached.recurrent_head import RecurrentHead, embed
from moot.model.decoder.products import Product, can_pack

_FEW_ROWS = 4
"""Up to here the product with bytes takes less time than the packed one: it computes more, and streams less."""
_STRIDE = 16
"""Inputs that the product with bytes reads at once, past the end of the weight where they do not divide by it."""
_LARGEST = 126.0
"""Of 127: a scale that was rounded down to bfloat16 keeps its largest number within a byte."""

_multiply: Any = getattr(torch, "_weight_int8pack_mm", None)
"""torch's own, not public: with a build without it the packed product computes."""


def can_multiply(dtype: torch.dtype, device: torch.device, *num_inputs: int) -> bool:
    """Whether weights of so many inputs can be held as bytes."""
    return _multiply is not None and can_pack(dtype, device) and all(number % _STRIDE == 0 for number in num_inputs)


class ByteProduct:
    """A product with a weight of one byte a number: x [rows, inputs] to [rows, outputs], both bfloat16; weight
    [outputs, inputs] as in a linear layer.

    Many rows are multiplied with the same numbers in bfloat16. Rows of a small product do not depend on each other.
    """

    __slots__ = ("_bytes", "_packed", "_scales")

    def __init__(self, weight: Tensor) -> None:
        numbers = weight.detach().float()
        # No scale of 0: where all numbers are 0, each byte is.
        self._scales = (numbers.abs().amax(1) / _LARGEST).clamp_min(1e-30).bfloat16()
        scales = self._scales.float()[:, None]
        self._bytes = (numbers / scales).round_().clamp_(-127, 127).to(torch.int8)
        self._packed = Product((self._bytes.float() * scales).bfloat16(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= _FEW_ROWS:
            return cast(Tensor, _multiply(x, self._bytes, self._scales))
        return self._packed(x)


_MOST_TABLED = 4096
"""Ids whose parts are kept: 2 * width * tokens numbers of two bytes each, 8 KB of the usual head."""
_SMALLEST = 1e-3
"""Of a state's root mean square, as `rms` has it."""


class PlainSteps:
    """Steps by the head's own modules, in the dtype and on the device of `rows`."""

    def __init__(self, head: RecurrentHead, rows: Tensor, embedding: Tensor) -> None:
        """`rows` [vocab, state]: of the target's output layer. `embedding` [ids, state]: the target's."""
        self._head = head.to(rows.device, rows.dtype)
        self._rows, self._embedding = rows, embedding

    def advance(self, states: Tensor, latest: Sequence[Sequence[int]]) -> Tensor:
        """One step of states float32 [n, state], given for each the last ids, the latest first."""
        ids = torch.tensor(latest, device=self._rows.device)
        return self._head.advance(states, embed(self._embedding, ids))

    def logits(self, states: Tensor) -> Tensor:
        """Logits float32 [n, vocab + 1], the last column for all ids that the head does not know."""
        return self._head.logits(states, self._rows)


class FastSteps:
    """`PlainSteps` in bfloat16 on CPUs, from which they differ by rounding."""

    def __init__(self, head: RecurrentHead, rows: Tensor, embedding: Tensor) -> None:
        state = head.shape.state
        inward, *of_tokens = head.inward.weight.detach().split(state, 1)
        self._inward = ByteProduct(inward)
        self._outward = ByteProduct(head.outward.weight)
        self._rows = ByteProduct(torch.cat((rows, head.other.detach().to(rows.dtype)[None])))
        self._bias = head.bias.detach().float()
        self._of_tokens = [ByteProduct(part) for part in of_tokens]
        self._embedding = embedding
        self._root = state**0.5
        ids = head.get_buffer("token_ids")[:_MOST_TABLED]
        embedded = embed(embedding, ids[:, None])
        # Views of one row each: to take one needs no call at all.
        views = [product(embedded).unbind(0) for product in self._of_tokens]
        self._known = [dict(zip(ids.tolist(), rows, strict=True)) for rows in views]

    def advance(self, states: Tensor, latest: Sequence[Sequence[int]]) -> Tensor:
        norm = torch.linalg.vector_norm(states, dim=1, keepdim=True).div_(self._root).clamp_min_(_SMALLEST)
        layer = self._inward(states.div(norm).bfloat16())
        for back in range(len(self._known)):
            parts = [self._part(back, ids[back]) for ids in latest]
            layer.add_(parts[0] if len(parts) == 1 else torch.stack(parts))
        gate, up = layer.chunk(2, 1)
        return self._outward(functional.silu(gate).mul_(up)).add(states)

    def logits(self, states: Tensor) -> Tensor:
        return self._rows(states.bfloat16()).add(self._bias)

    def _part(self, back: int, token_id: int) -> Tensor:
        """What a token adds to the layer where it is the last but `back`, [2 * width]."""
        known = self._known[back].get(token_id)
        if known is None:
            return self._of_tokens[back](embed(self._embedding, torch.tensor([[token_id]])))[0]
        return known


def head_steps(head: RecurrentHead, rows: Tensor, embedding: Tensor) -> PlainSteps | FastSteps:
    """The fastest steps for this dtype and device."""
    if can_multiply(rows.dtype, rows.device, head.shape.state, head.shape.width):
        return FastSteps(head, rows, embedding)
    return PlainSteps(head, rows, embedding)
