"""A decoder's layers by compiled kernels, one call for each layer.

`StepPlan` tells the kernels of a step where each row's keys and values lie, and what it attends to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moot.core.types import ROOT
from moot.model.cache.kv_cache import depths_of
from moot.model.decoder.kernels.kernel_products import KernelProduct
from moot.model.decoder.kernels.library import MOST_DIM, CAttention, CLayer, CNorm, CPlan, CRows, CWeight, Kernels
from moot.model.decoder.layers import DecoderWeights, HeadShape, Layer, Norm
from moot.model.decoder.products import Product
from moot.model.layout import Segment, Step

_BLOCK_QUERIES = 12
"""Queries, heads counted, that share the packing of their keys."""

_SLOTS = 16


class StepPlan:
    """The plan of one step, for all its layers.

    step_rows: rows of the step, padding included, whose results are zeros. turns: float32 [step_rows, dim], cosine and
    sine of each pair in turn.
    """

    def __init__(self, step: Step, step_rows: int, turns: Tensor, heads: HeadShape) -> None:
        segments: list[Sequence[int]] = []
        rows: list[Sequence[int]] = []
        blocks: list[tuple[int, int, int]] = []
        paths: list[int] = []
        per_block = max(1, _BLOCK_QUERIES // heads.group)
        longest = 0
        for index, segment in enumerate(step.segments):
            is_chain, count, parents = segment.tree_kv is None, segment.count, segment.parents
            segments.append(_segment_fields(segment))
            for node, depth in enumerate(range(count) if is_chain else depths_of(parents)):
                position = segment.cache.length + depth
                rows.append((index, position, node, len(paths)))
                longest = max(longest, position + 1)
                if not is_chain:
                    paths += _path(parents, node)
            blocks += [
                (index, segment.start + first, min(per_block, count - first)) for first in range(0, count, per_block)
            ]
        threads, dtype = torch.get_num_threads(), step.segments[0].cache.data.dtype
        most_queries = per_block * heads.group
        # Scores of all queries of a block as float32, then their weights as bfloat16.
        scratch = -(-3 * most_queries * (longest + 2 * _SLOTS) // 2)
        shape = (step_rows, heads.query_heads * heads.dim)
        queries = torch.empty(shape, dtype=dtype)
        self.mixed = torch.empty(shape, dtype=dtype)
        self.mixed[len(rows) :] = 0
        tables = [np.array(table, dtype=np.int64) for table in (segments, rows, blocks, paths or [0])]
        scratches = torch.empty(threads, scratch)
        self._kept = (turns, queries, scratches, tables)
        self.c_plan = CPlan(
            *(len(rows), len(blocks), threads, heads.query_heads, heads.kv_heads, heads.dim),
            *(scratch, most_queries),
            *(table.ctypes.data for table in tables),
            *(tensor.data_ptr() for tensor in (turns, queries, self.mixed, scratches)),
        )


def _segment_fields(segment: Segment) -> Sequence[int]:
    cache = segment.cache
    layer, kv, slot, head, _ = (stride * cache.data.itemsize for stride in cache.data.stride())
    own = (cache.data.data_ptr(), layer, kv, head, slot, cache.length)
    nodes = segment.tree_kv
    if nodes is None:
        return (*own, 0, 0, 0, 0, 0)
    layer, kv, node, head, _ = (stride * nodes.itemsize for stride in nodes.stride())
    return (*own, nodes.data_ptr(), layer, kv, head, node)


def _path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def kernels_suit(heads: HeadShape, width: int, inner: int) -> bool:
    """Whether kernels take heads of this size, rows of this width, and so many numbers between the gated products."""
    return heads.dim % 32 == 0 and heads.dim <= MOST_DIM and width % 16 == 0 and inner % 16 == 0


class KernelLayers:
    """The layers of a decoder whose weights lie as the kernels need them."""

    def __init__(self, kernels: Kernels, weights: DecoderWeights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._layers = [_c_layer(layer) for layer in weights.layers]
        self._last_norm = _c_norm(weights.last_norm)

    def run(self, hidden: Tensor, positions: Sequence[int], step: Step, layers: Sequence[int]) -> Tensor:
        """hidden: the residual stream, float32 [rows, width], written to. Returns the hidden rows after all layers and
        the last norm, bfloat16 of that shape."""
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
