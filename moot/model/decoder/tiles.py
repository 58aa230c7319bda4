"""The attention tiles of one step with everything that is the same in all layers looked up once.

Attention of few query rows over many slots as two matrix products, the heads of a group sharing their keys.

Half the time of torch's fused call for 16 rows and 500 slots. Scores and weights are bfloat16, as they are in
transformers' plain attention; sums are float32.

Where a layer's fresh keys and values go: into slots, and for trees beside them until they are committed.

Fresh ones are [2, rows, kv_heads, dim]: keys and values of all rows of the step.

Attention of several requests in one call: which tiles go together, and the call.

Requests whose caches lie in neighbouring slabs of a chunk are one batch of matrix products. A slab between them that
has no part in the step is computed for nothing, which costs a fraction of a call. Row counts and numbers of slabs come
from short lists, so that the check at start can try them all: they are rounded up.

The paths of a tree take the same slots, one after the other: the first of all trees are computed together, then the
second ones, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moot.model.cache.base import Pending
from moot.model.cache.contiguous import Chunk, Slab
from moot.model.decoder.layers import HeadShape
from moot.model.layout import Segment, Step, Tile, additive_mask
from moot.model.rows import RowRules


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, group: int, by_products: bool) -> Tensor:
    """queries [kv_heads, rows * group, dim], scaled, the heads of a group side by side for each row; keys and values
    [kv_heads, slots, dim]; additive mask [rows * group, slots]. Returns what the queries' shape is."""
    if by_products:
        scores = torch.bmm(queries, keys.transpose(1, 2)).add_(mask)
        return torch.bmm(torch.softmax(scores, -1), values)
    kv_heads, count, dim = queries.shape
    apart = queries.view(kv_heads, count // group, group, dim).transpose(1, 2)
    together = scaled_dot_product_attention(
        apart.reshape(1, kv_heads * group, count // group, dim),
        keys[None],
        values[None],
        attn_mask=mask[::group],
        scale=1.0,
        enable_gqa=group > 1,
    )
    return together.view(kv_heads, group, count // group, dim).transpose(1, 2).reshape(kv_heads, count, dim)


def attend_together(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same for several requests, by products: queries [requests * kv_heads, rows * group, dim], keys and values
    [requests * kv_heads, slots, dim], mask [requests, 1, rows * group, slots]. Returns what the queries' shape is."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    scores.view(mask.shape[0], -1, *scores.shape[1:]).add_(mask)
    return torch.bmm(torch.softmax(scores, -1), values)


class ChainStore:
    """Rows of one chain, to the slots after the committed ones."""

    __slots__ = ("_found", "_targets")

    def __init__(self, segment: Segment, fresh: Tensor) -> None:
        cache = segment.cache
        self._found = fresh[:, segment.start : segment.start + segment.count]
        self._targets = cache.data[:, :, cache.length : cache.length + segment.count].unbind(0)

    def store(self, layer: int) -> None:
        self._targets[layer].copy_(self._found)


class TreeStore:
    """Nodes of all trees of the step in one piece, of which each tree's pending tokens are a part."""

    __slots__ = ("_fresh", "_rows", "_targets")

    def __init__(self, segments: Sequence[Segment], num_layers: int, fresh: Tensor) -> None:
        rows = [row for segment in segments for row in range(segment.start, segment.start + segment.count)]
        two, _, kv_heads, dim = fresh.shape
        nodes = fresh.new_zeros(num_layers, two, len(rows), kv_heads, dim)
        for segment, own in zip(segments, nodes.split([segment.count for segment in segments], 2), strict=True):
            pending = segment.cache.pending
            assert pending is not None
            segment.cache.pending = Pending(pending.parents, own)
        self._fresh, self._rows, self._targets = fresh, torch.tensor(rows), nodes.unbind(0)

    def store(self, layer: int) -> None:
        torch.index_select(self._fresh, 1, self._rows, out=self._targets[layer])


class SlabStore:
    """Rows of several requests whose caches lie in one chunk, each to the slots after its committed ones: one copy.

    `parts`: slab, committed slots and rows of each request.
    """

    __slots__ = ("_fresh", "_picked", "_slots", "_target")

    def __init__(self, chunk: Chunk, parts: Iterable[tuple[Slab, int, Sequence[int]]], fresh: Tensor) -> None:
        _, step_rows, kv_heads, dim = fresh.shape
        _, two, slabs, _, slots, _ = chunk.data.shape
        rows: list[int] = []
        places: list[int] = []
        for slab, length, own in parts:
            first = slab.index * kv_heads * slots + length
            rows += own
            places += range(first, first + len(own))
        each, both = torch.arange(kv_heads), torch.arange(two)[:, None, None]
        target = both * (slabs * kv_heads * slots) + torch.tensor(places)[:, None] + each * slots
        picked = both * (step_rows * kv_heads) + torch.tensor(rows)[:, None] * kv_heads + each
        self._target = target.flatten()
        self._picked = None if rows == list(range(step_rows)) else picked.flatten()
        self._slots = chunk.data.view(len(chunk.data), -1, dim).unbind(0)
        self._fresh = fresh.view(-1, dim)

    def store(self, layer: int) -> None:
        fresh = self._fresh if self._picked is None else self._fresh.index_select(0, self._picked)
        self._slots[layer].index_copy_(0, self._target, fresh)


SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Numbers of slabs that a call may take."""

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Query rows that a call may take of each request."""

_WIDEST_GAP = 3
"""Slabs without a part in the step that a call reaches over at most."""

_SLAB, _ROW, _ALONE = 8.0, 1.6, 42.0
"""What a slab in a call, each row of it, and a call of its own cost, in microseconds for 3 heads and 256 slots. Only
their proportions matter, and only to speed."""


@dataclass(frozen=True, slots=True)
class Member:
    """One request's part of a call. `rows`: where its queries lie in the step."""

    slab: Slab
    segment: Segment
    tile: Tile
    rows: Sequence[int]


class Together:
    """One call for `num_slabs` slabs from `first` on, each with `num_rows` query rows: padding, where slabs have fewer
    or no part in the step."""

    __slots__ = (
        "_group",
        "_keys",
        "_masks",
        "_picked",
        "_positions",
        "_real",
        "_shape",
        "_target",
        "_values",
        "chunk",
        "first",
        "members",
        "num_rows",
        "num_slabs",
    )

    def __init__(
        self, chunk: Chunk, first: int, size: int, members: Sequence[Member], step_rows: int, heads: HeadShape
    ) -> None:
        rows = next(rows for rows in ROWS if rows >= max(len(member.tile.positions) for member in members))
        self.chunk, self.first, self.num_slabs, self.num_rows = chunk, first, size, rows
        self.members = members
        picked, positions = [[0] * rows for _ in range(size)], [[0] * rows for _ in range(size)]
        real: list[int] = []
        for member in members:
            place, count, own = member.slab.index - first, len(member.rows), member.tile.positions
            picked[place] = [*member.rows, *[member.rows[-1]] * (rows - count)]
            positions[place] = [*own[:count], *[own[count - 1]] * (rows - count)]
            real += range(place * rows, place * rows + count)
        self._positions = torch.tensor(positions)
        self._masks: dict[int | None, Tensor] = {}
        self._group = heads.group
        self._shape = (size * heads.kv_heads, rows * heads.group, heads.dim)
        step, each = torch.tensor(picked), torch.arange(heads.kv_heads)
        # Of [kv_heads, step_rows] to [size, kv_heads, rows], and from there to [step_rows, kv_heads].
        self._picked = (step[:, None] + step_rows * each[:, None]).flatten()
        target = (step[:, None] * heads.kv_heads + each[:, None]).flatten()
        self._real: Tensor | None = None
        if len(real) < size * rows:
            places = torch.tensor(real)
            self._real = (
                ((places // rows)[:, None] * heads.kv_heads + each) * rows + (places % rows)[:, None]
            ).flatten()
            target = target[self._real]
        self._target = target
        attended = chunk.data[:, :, first : first + size].flatten(2, 3)
        self._keys, self._values = attended[:, 0].unbind(0), attended[:, 1].unbind(0)

    def attend(self, layer: int, window: int | None, queries: Tensor, mixed: Tensor) -> None:
        """queries [kv_heads * step_rows, group * dim]; results go to their rows of mixed [step_rows * kv_heads,
        group * dim]."""
        own = queries.index_select(0, self._picked).view(self._shape)
        result = attend_together(own, self._keys[layer], self._values[layer], self._mask(window, queries.dtype))
        result = result.view(-1, queries.shape[1])
        if self._real is not None:
            result = result.index_select(0, self._real)
        mixed.index_copy_(0, self._target, result)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            mask = additive_mask(self._positions, self._keys[0].shape[1], window, dtype)
            self._masks[window] = mask.repeat_interleave(self._group, 1)[:, None]
        return self._masks[window]


@dataclass(slots=True)
class Round:
    """Tiles that do not take each other's slots: in calls for several requests, and those that are left."""

    calls: list[Together] = field(default_factory=list)
    alone: list[tuple[Segment, Tile]] = field(default_factory=list)

    @property
    def paths(self) -> dict[Chunk, list[tuple[Slab, int, Sequence[int]]]]:
        """What must lie in the slots before the calls: slab, committed slots and rows of each path of a tree."""
        found: dict[Chunk, list[tuple[Slab, int, Sequence[int]]]] = {}
        for call in self.calls:
            for member in call.members:
                if member.tile.path is not None:
                    rows = [member.segment.start + node for node in member.tile.path.tolist()]
                    found.setdefault(call.chunk, []).append((member.slab, member.segment.cache.length, rows))
        return found


def plan_rounds(segments: Iterable[Segment], step_rows: int, heads: HeadShape, rules: RowRules) -> list[Round]:
    """To be computed one after the other: all tiles of chains and the first of each tree, then its second, ..."""
    rounds: list[list[tuple[Segment, Tile]]] = []
    for segment in segments:
        for number, tile in enumerate(segment.tiles):
            place = 0 if segment.is_chain else number
            if place == len(rounds):
                rounds.append([])
            rounds[place].append((segment, tile))
    return [_round(tiles, step_rows, heads, rules) for tiles in rounds]


def _round(tiles: Sequence[tuple[Segment, Tile]], step_rows: int, heads: HeadShape, rules: RowRules) -> Round:
    found = Round()
    side_by_side: dict[Chunk, list[Member]] = {}
    for segment, tile in tiles:
        slab = segment.cache.slab
        # The check has tried whole slabs only; a tile that ends a span before its slab does is left.
        fits = slab is not None and len(tile.positions) <= ROWS[-1] and tile.kv_length == slab.chunk.slots
        if slab is None or not fits or not rules.together or tile.kv_length > rules.product_slots:
            found.alone.append((segment, tile))
            continue
        own = tile.own_rows
        rows = range(own.start, own.stop) if isinstance(own, slice) else own.tolist()
        side_by_side.setdefault(slab.chunk, []).append(Member(slab, segment, tile, rows))
    for chunk, members in side_by_side.items():
        members.sort(key=lambda member: member.slab.index)
        done: set[int] = set()
        for first, size, run in _runs(chunk.num_slabs, members):
            found.calls.append(Together(chunk, first, size, run, step_rows, heads))
            done.update(member.slab.index for member in run)
        found.alone += [(member.segment, member.tile) for member in members if member.slab.index not in done]
    return found


def _runs(num_slabs: int, members: Sequence[Member]) -> Iterator[tuple[int, int, Sequence[Member]]]:
    """First slab and number of slabs of calls, with those of `members`, in the order of slabs, that take part."""
    indices = [member.slab.index for member in members]
    borders = [place for place, (one, other) in enumerate(pairwise(indices), 1) if other - one > _WIDEST_GAP + 1]
    for start, end in pairwise([0, *borders, len(members)]):
        run = _worthwhile(members[start:end])
        while len(run) > 1:
            first, length = run[0].slab.index, run[-1].slab.index - run[0].slab.index + 1
            size = next((size for size in SIZES if length <= size <= num_slabs), None)
            if size is None:
                size = max(size for size in SIZES if size <= min(length, num_slabs))
            first = min(first, num_slabs - size)
            taken = [member for member in run if member.slab.index < first + size]
            if len(taken) > 1:
                yield first, size, taken
            run = run[len(taken) :]


def _worthwhile(run: Sequence[Member]) -> Sequence[Member]:
    """`run` without the tiles of so many rows that padding the others would cost more than calls of their own."""

    def cost(most: int) -> float:
        kept = [member.slab.index for member in run if len(member.tile.positions) <= most]
        return (kept[-1] - kept[0] + 1) * (_SLAB + _ROW * most) + (len(run) - len(kept)) * _ALONE

    most = min({len(member.tile.positions) for member in run}, key=cost)
    return [member for member in run if len(member.tile.positions) <= most]


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
