"""Matrix products with a weight of one byte a number, for guesses: few rows stream half the memory of bfloat16.

Each output has a scale, and its numbers are multiples of it. A guess may be off by that much; what the target says must
not, so that nothing of it is multiplied here.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

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
    """x [rows, inputs] to [rows, outputs], both bfloat16; weight [outputs, inputs] as in a linear layer.

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
