"""Matrix products with a weight in the layout that oneDNN multiplies fastest on this machine.

The layout is chosen once, so that no product reorders its weight: SmolLM2's products take 25 to 30 % less time than
with plain weights, from one row up. The packed copy replaces the original.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
"""torch's own, not public: with a build without them the model's modules compute."""

_multiply: Any = getattr(getattr(torch.ops.mkldnn, _OPERATORS[0], None), "default", None)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Product:
    """A linear layer: x [rows, inputs] to [rows, outputs], both bfloat16; weight [outputs, inputs] and bias as in a
    linear layer."""

    __slots__ = ("_bias", "_packed", "has_bias", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.has_bias = bias is not None
        self._packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, _multiply(x, self._packed, self._bias, "none", [], ""))

    def in_tiles(self, x: Tensor, most_rows: int) -> Tensor:
        """The same product, at most `most_rows` rows a call."""
        if x.shape[0] <= most_rows:
            return self(x)
        return torch.cat([self(part) for part in x.split(most_rows)])
