"""The attention tiles of one step with everything that is the same in all layers looked up once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moot.model.arena import Chunk, Slab
from moot.model.attention import Segment, Step, Tile
from moot.model.decoder.layers import HeadShape
from moot.model.decoder.stores import ChainStore, SlabStore, TreeStore
from moot.model.decoder.together import ROWS, Round, plan_rounds
from moot.model.determinism import RowRules

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]


class _Attended:
    """One tile: its queries, what they attend to in each layer, and where the result goes."""

    __slots__ = ("_masks", "_tile", "by_products", "index", "keys", "moved", "output", "queries", "values")

    def __init__(
        self, segment: Segment, tile: Tile, queries: Tensor, mixed: Tensor, heads: HeadShape, limit: int
    ) -> None:
        kv_heads, dim = heads.kv_heads, heads.dim
        slots = segment.cache.data.transpose(2, 3)  # [layers, 2, kv_heads, slots, dim]
        attended = slots[:, :, :, : tile.kv_length]
        self.keys, self.values = attended[:, 0].unbind(0), attended[:, 1].unbind(0)
        self.by_products = tile.kv_length <= limit
        self._tile, self._masks = tile, {}  # type: tuple[Tile, dict[int | None, Tensor]]
        self.index: Tensor | None = None
        self.moved: tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor] | None = None
        if isinstance(tile.rows, slice):
            self.queries = queries[:, tile.rows].view(kv_heads, -1, dim)
            self.output = mixed[tile.own_rows].transpose(0, 1)
        else:
            self.index, self.queries, self.output = tile.rows, queries, mixed
        pending, length = segment.cache.pending, segment.cache.length
        if tile.path is not None and pending is not None and pending.tree_kv is not None:
            tail = slots[:, :, :, length : length + len(tile.path)]
            self.moved = pending.tree_kv.transpose(2, 3).unbind(0), tail.unbind(0), tile.path

    def mask(self, window: int | None, group: int) -> Tensor:
        """[rows * group, kv_length]."""
        if window not in self._masks:
            self._masks[window] = self._tile.mask(window, self.queries).repeat_interleave(group, 0)
        return self._masks[window]

    def attend(self, layer: int, window: int | None, group: int, function: Attend) -> None:
        queries = self.queries
        if self.moved is not None:
            tree, tail, path = self.moved
            tail[layer].copy_(tree[layer].index_select(2, path))
        if self.index is not None:
            kv_heads, _, _, dim = queries.shape
            queries = queries.index_select(1, self.index).view(kv_heads, -1, dim)
        mask = self.mask(window, group)
        result = function(queries, self.keys[layer], self.values[layer], mask, group, self.by_products)
        result = result.view(result.shape[0], -1, group, result.shape[2])
        count = self._tile.num_rows
        if count < result.shape[1]:
            result = result[:, :count]
        if self.index is None:
            self.output.copy_(result)
        else:
            self.output.index_copy_(0, self.index[:count], result.transpose(0, 1))


class StepTiles:
    """Takes each layer's heads of all rows, and gives what attention makes of them."""

    def __init__(self, step: Step, rows: int, heads: HeadShape, rules: RowRules) -> None:
        data = step.segments[0].cache.data
        self._heads = heads
        self._progress = step.progress
        self._queries = data.new_empty(heads.kv_heads, rows, heads.group, heads.dim)
        # Rows that only pad belong to nobody and get zeros.
        self._mixed = data.new_zeros(rows, heads.kv_heads, heads.group, heads.dim)
        self._flat = self._mixed.view(rows, -1)
        self._fresh = data.new_empty(2, rows, heads.kv_heads, heads.dim)
        self._fresh_keys, self._fresh_values = self._fresh.unbind(0)
        self._heads_of_queries = self._queries.view(heads.kv_heads * rows, -1)
        self._heads_of_mixed = self._mixed.view(rows * heads.kv_heads, -1)
        self._stores = _stores(step.segments, len(data), self._fresh)
        self._rounds = [
            _Round(each, self._fresh, self._queries, self._mixed, heads, rules.product_slots)
            for each in plan_rounds(step.segments, rows, heads, rules)
        ]

    def store(self, layer: int, turned: Tensor, values: Tensor) -> None:
        """Keys and values go into the caches. turned: query and key heads [rows, heads, dim]; values: value heads."""
        heads, rows = self._heads, turned.shape[0]
        queries = turned[:, : heads.query_heads].view(rows, heads.kv_heads, heads.group, heads.dim)
        self._queries.copy_(queries.transpose(0, 1))
        self._fresh_keys.copy_(turned[:, heads.query_heads :])
        self._fresh_values.copy_(values)
        for each in self._stores:
            each.store(layer)

    def attend(self, layer: int, window: int | None, function: Attend) -> Tensor:
        """[rows, heads * dim]."""
        for each in self._rounds:
            for path in each.paths:
                path.store(layer)
            for call in each.calls:
                call.attend(layer, window, self._heads_of_queries, self._heads_of_mixed)
                self._progress()
            for tile in each.tiles:
                tile.attend(layer, window, self._heads.group, function)
                self._progress()
        return self._flat


class _Round:
    """A round with where its paths go and what its single tiles attend to."""

    __slots__ = ("calls", "paths", "tiles")

    def __init__(
        self, planned: Round, fresh: Tensor, queries: Tensor, mixed: Tensor, heads: HeadShape, limit: int
    ) -> None:
        self.paths = [SlabStore(chunk, parts, fresh) for chunk, parts in planned.paths.items()]
        self.calls = planned.calls
        self.tiles = [_Attended(*each, queries, mixed, heads, limit) for each in planned.alone]


def _stores(segments: Sequence[Segment], num_layers: int, fresh: Tensor) -> list[ChainStore | SlabStore | TreeStore]:
    trees = [segment for segment in segments if not segment.is_chain]
    chunks: dict[Chunk, list[tuple[Slab, int, Sequence[int]]]] = {}
    chains: list[ChainStore | SlabStore | TreeStore] = []
    for segment in segments:
        slab, rows = segment.cache.slab, range(segment.start, segment.start + segment.count)
        if segment.is_chain and slab is not None and segment.count <= ROWS[-1]:
            chunks.setdefault(slab.chunk, []).append((slab, segment.cache.length, rows))
        elif segment.is_chain:
            chains.append(ChainStore(segment, fresh))
    together = [SlabStore(chunk, parts, fresh) for chunk, parts in chunks.items()]
    return [*chains, *together, *([TreeStore(trees, num_layers, fresh)] if trees else [])]
