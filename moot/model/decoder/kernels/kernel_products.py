"""Products with weights in the kernels' layout: every row's sums run in one order, however many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moot.model.decoder.kernels.library import CWeight, Kernels
from moot.model.decoder.products import Product


class KernelProduct(Product):
    """A `Product` by the kernels. `single`: it gives float32, its sums as they are. `gated`: the first half of the
    weight's outputs are gates, and what comes out is silu(gate) times the second half, [rows, outputs / 2].

    Inputs are a multiple of 2; gated outputs of 32.
    """

    __slots__ = ("_gives", "_kernels", "_scaled", "_weight", "c_weight", "gated")

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, gated: bool = False, single: bool = False
    ) -> None:
        self.outputs, self.inputs = weight.shape
        self.has_bias, self.gated, self._kernels = bias is not None, gated, kernels
        self._gives = torch.float32 if single else torch.bfloat16
        if gated:
            half = kernels.outputs // 2
            order = torch.arange(self.outputs).view(2, -1, half).transpose(0, 1).flatten()
            weight, bias = weight[order], None if bias is None else bias[order]
        padded = functional.pad(weight.detach(), (0, 0, 0, -self.outputs % kernels.outputs))
        self._weight = padded.view(-1, kernels.outputs, self.inputs // 2, 2).transpose(1, 2).contiguous()
        self._scaled = None if bias is None else bias.detach().float().contiguous()
        addend = None if self._scaled is None else self._scaled.data_ptr()
        self.c_weight = CWeight(self.outputs, self.inputs, self._weight.data_ptr(), addend)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self.outputs // 2 if self.gated else self.outputs, dtype=self._gives)
        self._kernels.product(self.c_weight, x.contiguous(), out, self.gated)
        return out
