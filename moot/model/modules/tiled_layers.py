"""Layers of a transformers model, replaced where rows must round alike or where a product can be shared.

- `TiledLinear`: products in row tiles (rows.py).
- `SharedLinear`: several layers fed the same input (query, key, value; gate, up) as one product. On a CPU one row of
  SmolLM2 spends a third less time in products this way.
- `RowwiseActivation`: activation functions whose vector code and scalar code for remainders round differently.

All of them do what the original does when no runner is driving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from moot.model.rows import NATURAL, current_rules, tiled_linear

SHARED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Siblings of these names get the same tensor as input, one call after the other."""

_ACTIVATION_HOMES = ("torch.nn.modules.activation", "transformers.activations")
_VECTOR_ELEMENTS = 64
_SERIAL_ELEMENTS = 32768
"""torch splits an elementwise operation among threads from this many elements on."""


class TiledLinear(nn.Linear):
    """A linear layer whose product follows the rules in force."""

    def forward(self, input: Tensor) -> Tensor:
        return tiled_linear(input, self.weight, self.bias)


class _SharedProduct:
    """One product for several layers. Computed when the first of them is called, handed out to the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        self.weight, self.bias, self.sizes = weight, bias, list(sizes)
        self._input: Tensor | None = None
        self._pieces: list[Tensor | None] = []

    def piece(self, index: int, input: Tensor) -> Tensor:
        if input is not self._input or self._pieces[index] is None:
            self._input = input
            self._pieces = list(tiled_linear(input, self.weight, self.bias).split(self.sizes, dim=-1))
        piece = cast(Tensor, self._pieces[index])
        self._pieces[index] = None
        if not any(kept is not None for kept in self._pieces):
            self._input = None
        return piece


class SharedLinear(nn.Linear):
    """A part of a shared product. Its weight is a view into the shared one."""

    product: _SharedProduct
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return self.product.piece(self.index, input)


class RowwiseActivation(nn.Module):
    """An activation function computed so that an element's place in the tensor does not matter.

    Whole rows per call, few enough that no thread boundary falls into a row, and one row per call where the width is
    not a multiple of the vector length.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        if current_rules() is NATURAL or input.device.type != "cpu":
            return cast(Tensor, self.activation(input))
        width = input.shape[-1]
        rows = input.reshape(-1, width)
        per_call = max(1, (_SERIAL_ELEMENTS - 1) // width) if width % _VECTOR_ELEMENTS == 0 else 1
        if rows.shape[0] <= per_call:
            return cast(Tensor, self.activation(input))
        return torch.cat([self.activation(part) for part in rows.split(per_call)]).view(input.shape)


def install(model: nn.Module) -> None:
    """Replace the layers of `model` in place. Names and tied weights stay."""
    for module in list(model.modules()):
        for names in SHARED_NAMES:
            _share(module, names)
        for name, child in list(module.named_children()):
            if type(child).__module__ in _ACTIVATION_HOMES and not isinstance(child, nn.MultiheadAttention):
                setattr(module, name, RowwiseActivation(child))
            elif type(child) is Conv1D:
                setattr(module, name, _transposed(child))
            elif type(child) is nn.Linear:
                child.__class__ = TiledLinear


def foreign_products(model: nn.Module) -> list[str]:
    """Names of parameters that may take part in products other than linear layers: experts, convolutions."""
    known = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and id(parameter) not in known]


def _transposed(layer: Conv1D) -> TiledLinear:
    """GPT-2's layer, whose weight is [in, out], as a linear layer."""
    weight = layer.weight.detach().t().contiguous()
    linear = TiledLinear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device=weight.device)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return linear


def _share(parent: nn.Module, names: Sequence[str]) -> None:
    children = dict(parent.named_children())
    layers = [children[name] for name in names if type(children.get(name)) is nn.Linear]
    if len(layers) < len(names):
        return
    linears = cast(list[nn.Linear], layers)
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return
    sizes = [linear.out_features for linear in linears]
    with torch.no_grad():
        weight = torch.cat([linear.weight for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    product = _SharedProduct(weight, bias, sizes)
    for index, (linear, part) in enumerate(zip(linears, weight.split(sizes), strict=True)):
        linear.weight = nn.Parameter(part, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.split(sizes)[index], requires_grad=False)
        linear.__class__ = SharedLinear
        shared = cast(SharedLinear, linear)
        shared.product, shared.index = product, index
