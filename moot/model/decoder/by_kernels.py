"""A decoder's layers by compiled kernels, one call for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moot.model.attention import Step
from moot.model.decoder.layers import HeadShape, Layer, Norm, Weights
from moot.model.decoder.products import Product
from moot.model.native.kernels import MOST_DIM, Kernels
from moot.model.native.plan import StepPlan
from moot.model.native.products import KernelProduct
from moot.model.native.structures import CAttention, CLayer, CNorm, CRows, CWeight


def kernels_suit(heads: HeadShape, width: int, inner: int) -> bool:
    """Whether kernels take heads of this size, rows of this width, and so many numbers between the gated products."""
    return heads.dim % 32 == 0 and heads.dim <= MOST_DIM and width % 16 == 0 and inner % 16 == 0


class KernelLayers:
    """Of weights whose products are the kernels'."""

    def __init__(self, kernels: Kernels, weights: Weights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._layers = [_c_layer(layer) for layer in weights.layers]
        self._last_norm = _c_norm(weights.last_norm)

    def run(self, hidden: Tensor, positions: Sequence[int], step: Step, layers: Sequence[int]) -> Tensor:
        """hidden: the residual stream, float32 [rows, width], written to. Returns what the last norm makes of it after
        the last layer, bfloat16 of that shape."""
        weights, (rows, width) = self._weights, hidden.shape
        turns = torch.view_as_real(weights.rotary.at(positions)).reshape(rows, -1)
        plan = StepPlan(step, rows, turns, weights.heads)
        first = weights.layers[0]
        delta, half = torch.empty_like(hidden), weights.embedding
        normed = half.new_empty(rows, width)
        projected = half.new_empty(rows, first.queries_keys_values.outputs)
        active = half.new_empty(rows, first.down.inputs)
        own = (hidden, delta, normed, projected, active)
        c_rows = CRows(rows, width, *(tensor.data_ptr() for tensor in own))
        norms = [*(self._layers[index].before_attention for index in layers), self._last_norm]
        self._kernels.norm(norms[0], hidden, None, normed)
        for index, following in zip(layers, norms[1:], strict=True):
            self._kernels.layer(plan.c_plan, self._layers[index], index, following, c_rows)
            step.progress()
        return normed


def _c_norm(norm: Norm) -> CNorm:
    return CNorm(norm.scale.data_ptr(), norm.epsilon)


def _c_weight(product: Product) -> CWeight:
    assert isinstance(product, KernelProduct)
    return product.c_weight


def _c_layer(layer: Layer) -> CLayer:
    norm = layer.head_norm
    scale, epsilon = (None, 0.0) if norm is None else (norm.scale.data_ptr(), norm.epsilon)
    products = (layer.queries_keys_values, layer.attended, layer.gate_up, layer.down)
    return CLayer(
        *map(_c_norm, (layer.before_attention, layer.before_mlp)),
        *map(_c_weight, products),
        CAttention(scale, epsilon, layer.query_scale, layer.window or 0),
    )
