"""Attention by torch: the tiles of one step, each by itself, with all that is the same in all layers looked up once.

A tile is two matrix products, the heads of a group sharing their keys: half the time of torch's fused call for 16 rows
and 500 slots. Scores and weights are bfloat16, as they are in transformers' plain attention; sums are float32.

Fresh keys and values, [2, rows, kv_heads, dim] of all rows of the step, go into slots; those of trees lie beside the
slots until they are committed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moot.model.decoder.layers import HeadShape
from moot.model.layout import Segment, Step, Tile


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, group: int, by_products: bool) -> Tensor:
    """Attention of one tile. queries [kv_heads, rows * group, dim], scaled, the heads of a group side by side for each
    row; keys and values [kv_heads, slots, dim]; additive mask [rows * group, slots]. Returns what the queries' shape
    is."""
    if by_products:
        scores = torch.bmm(queries, keys.transpose(1, 2)).add_(mask)
        return torch.bmm(torch.softmax(scores, -1), values)
    kv_heads, count, dim = queries.shape
    apart = queries.view(kv_heads, count // group, group, dim).transpose(1, 2)
    batched = scaled_dot_product_attention(
        apart.reshape(1, kv_heads * group, count // group, dim),
        keys[None],
        values[None],
        attn_mask=mask[::group],
        scale=1.0,
        enable_gqa=group > 1,
    )
    return batched.view(kv_heads, group, count // group, dim).transpose(1, 2).reshape(kv_heads, count, dim)


def _places(segment: Segment) -> tuple[Tensor, ...]:
    """Where the keys and values of a segment's rows go in each layer, [2, rows, kv_heads, dim]."""
    cache = segment.cache
    if segment.tree_kv is not None:
        return segment.tree_kv.unbind(0)
    return cache.data[:, :, cache.length : cache.length + segment.count].unbind(0)


class _Attended:
    """One tile: its queries, what they attend to in each layer, and where the result goes."""

    __slots__ = ("_tile", "by_products", "index", "keys", "moved", "output", "queries", "values")

    def __init__(
        self, segment: Segment, tile: Tile, queries: Tensor, mixed: Tensor, heads: HeadShape, limit: int
    ) -> None:
        kv_heads, dim = heads.kv_heads, heads.dim
        slots = segment.cache.data.transpose(2, 3)  # [layers, 2, kv_heads, slots, dim]
        attended = slots[:, :, :, : tile.kv_length]
        self.keys, self.values = attended[:, 0].unbind(0), attended[:, 1].unbind(0)
        self.by_products = tile.kv_length <= limit
        self._tile = tile
        self.index: Tensor | None = None
        self.moved: tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor] | None = None
        if isinstance(tile.rows, slice):
            self.queries = queries[:, tile.rows].view(kv_heads, -1, dim)
            self.output = mixed[tile.own_rows].transpose(0, 1)
        else:
            self.index, self.queries, self.output = tile.rows, queries, mixed
        if tile.path is not None and segment.tree_kv is not None:
            length = segment.cache.length
            tail = slots[:, :, :, length : length + len(tile.path)]
            self.moved = segment.tree_kv.transpose(2, 3).unbind(0), tail.unbind(0), tile.path

    def attend(self, layer: int, window: int | None, group: int) -> None:
        queries = self.queries
        if self.moved is not None:
            tree, tail, path = self.moved
            tail[layer].copy_(tree[layer].index_select(2, path))
        if self.index is not None:
            kv_heads, _, _, dim = queries.shape
            queries = queries.index_select(1, self.index).view(kv_heads, -1, dim)
        mask = self._tile.mask(window, queries, group)
        result = attend(queries, self.keys[layer], self.values[layer], mask, group, self.by_products)
        result = result.view(result.shape[0], -1, group, result.shape[2])
        count = self._tile.num_rows
        if count < result.shape[1]:
            result = result[:, :count]
        if self.index is None:
            self.output.copy_(result)
        else:
            self.output.index_copy_(0, self.index[:count], result.transpose(0, 1))


class StepTiles:
    """The tiles of one step: takes each layer's heads of all rows, and gives their attention."""

    def __init__(self, step: Step, rows: int, heads: HeadShape, product_slots: int) -> None:
        data = step.segments[0].cache.data
        self._heads = heads
        self._progress = step.progress
        self._queries = data.new_empty(heads.kv_heads, rows, heads.group, heads.dim)
        # Rows that only pad belong to nobody and get zeros.
        self._mixed = data.new_zeros(rows, heads.kv_heads, heads.group, heads.dim)
        self._fresh = data.new_empty(2, rows, heads.kv_heads, heads.dim)
        self._fresh_keys, self._fresh_values = self._fresh.unbind(0)
        self._stored = [
            (_places(segment), self._fresh[:, segment.start : segment.start + segment.count])
            for segment in step.segments
        ]
        self._tiles = [
            _Attended(segment, tile, self._queries, self._mixed, heads, product_slots)
            for segment in step.segments
            for tile in segment.tiles
        ]

    def store(self, layer: int, turned: Tensor, values: Tensor) -> None:
        """Put keys and values into the caches. turned: query and key heads [rows, heads, dim]; values: value heads."""
        heads, rows = self._heads, turned.shape[0]
        queries = turned[:, : heads.query_heads].view(rows, heads.kv_heads, heads.group, heads.dim)
        self._queries.copy_(queries.transpose(0, 1))
        self._fresh_keys.copy_(turned[:, heads.query_heads :])
        self._fresh_values.copy_(values)
        for places, fresh in self._stored:
            places[layer].copy_(fresh)

    def attend(self, layer: int, window: int | None) -> Tensor:
        """The attention of all rows, [rows, heads * dim]."""
        # One after the other: the paths of a tree take the same slots.
        for tile in self._tiles:
            tile.attend(layer, window, self._heads.group)
            self._progress()
        return self._mixed.view(len(self._mixed), -1)
