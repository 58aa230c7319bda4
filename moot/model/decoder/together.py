"""Attention of several requests in one call: which tiles go together, and the call.

Requests whose caches lie in neighbouring slabs of a chunk are one batch of matrix products. A slab between them that
has no part in the step is computed for nothing, which costs a fraction of a call. Row counts and numbers of slabs come
from short lists, so that the check at start can try them all: they are rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moot.model.arena import Chunk
from moot.model.attention import Segment, Tile, additive_mask
from moot.model.decoder.attend import attend_together
from moot.model.decoder.layers import HeadShape
from moot.model.determinism import RowRules

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Numbers of slabs that a call may take."""

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Query rows that a call may take of each request."""

_WIDEST_GAP = 3
"""Slabs without a part in the step that a call reaches over at most."""

_SLAB, _ROW, _ALONE = 8.0, 1.6, 42.0
"""What a slab in a call, each row of it, and a call of its own cost, in microseconds for 3 heads and 256 slots. Only
their proportions matter, and only to speed."""


class Together:
    """One call for `num_slabs` slabs from `first` on, each with `num_rows` query rows: padding, where slabs have fewer
    or no part in the step. `tiles`: what is computed, of as many requests."""

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
        "num_rows",
        "num_slabs",
        "tiles",
    )

    def __init__(
        self, chunk: Chunk, first: int, size: int, members: Sequence[tuple[int, Tile]], step_rows: int, heads: HeadShape
    ) -> None:
        rows = next(rows for rows in ROWS if rows >= max(len(tile.positions) for _, tile in members))
        self.chunk, self.first, self.num_slabs, self.num_rows = chunk, first, size, rows
        self.tiles = [tile for _, tile in members]
        picked, positions = [[0] * rows for _ in range(size)], [[0] * rows for _ in range(size)]
        real: list[int] = []
        for index, tile in members:
            assert isinstance(tile.rows, slice)
            place, count, start = index - first, tile.num_rows, tile.rows.start
            picked[place] = [*range(start, start + count), *[start + count - 1] * (rows - count)]
            positions[place] = [*tile.positions[:count], *[tile.positions[count - 1]] * (rows - count)]
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


def in_slabs(segments: Iterable[Segment]) -> dict[Chunk, list[Segment]]:
    """The chains with few rows whose caches lie in each chunk."""
    found: dict[Chunk, list[Segment]] = {}
    for segment in segments:
        if segment.is_chain and segment.count <= ROWS[-1] and segment.cache.slab is not None:
            found.setdefault(segment.cache.slab.chunk, []).append(segment)
    return found


def plan_together(
    segments: Iterable[Segment], step_rows: int, heads: HeadShape, rules: RowRules
) -> tuple[list[Together], list[tuple[Segment, Tile]]]:
    """The calls that take several requests, and the tiles that are left."""
    tiles = [(segment, tile) for segment in segments for tile in segment.tiles]
    if not rules.together:
        return [], tiles
    side_by_side: dict[Chunk, list[tuple[int, Tile]]] = {}
    for segment, tile in tiles:
        slab = segment.cache.slab
        if slab is None or not segment.is_chain or len(tile.positions) > ROWS[-1]:
            continue
        # The check has tried whole slabs only; a tile that ends a span before its slab does is left.
        if tile.kv_length == slab.chunk.slots <= rules.product_slots:
            side_by_side.setdefault(slab.chunk, []).append((slab.index, tile))
    calls: list[Together] = []
    done: set[int] = set()
    for chunk, members in side_by_side.items():
        for first, size, run in _runs(chunk.num_slabs, sorted(members, key=lambda member: member[0])):
            calls.append(Together(chunk, first, size, run, step_rows, heads))
            done.update(id(tile) for _, tile in run)
    return calls, [(segment, tile) for segment, tile in tiles if id(tile) not in done]


def _runs(num_slabs: int, members: Sequence[tuple[int, Tile]]) -> Iterable[tuple[int, int, Sequence[tuple[int, Tile]]]]:
    """First slab and number of slabs of calls, with those of `members`, in the order of slabs, that take part."""
    borders = [place for place, (one, other) in enumerate(pairwise(members), 1) if other[0] - one[0] > _WIDEST_GAP + 1]
    for start, end in pairwise([0, *borders, len(members)]):
        run = _worthwhile(members[start:end])
        while len(run) > 1:
            first, length = run[0][0], run[-1][0] - run[0][0] + 1
            size = next((size for size in SIZES if length <= size <= num_slabs), None)
            if size is None:
                size = max(size for size in SIZES if size <= min(length, num_slabs))
            first = min(first, num_slabs - size)
            taken = [member for member in run if member[0] < first + size]
            if len(taken) > 1:
                yield first, size, taken
            run = run[len(taken) :]


def _worthwhile(run: Sequence[tuple[int, Tile]]) -> Sequence[tuple[int, Tile]]:
    """`run` without the tiles of so many rows that padding the others would cost more than calls of their own."""

    def cost(most: int) -> float:
        kept = [index for index, tile in run if len(tile.positions) <= most]
        return (kept[-1] - kept[0] + 1) * (_SLAB + _ROW * most) + (len(run) - len(kept)) * _ALONE

    most = min({len(tile.positions) for _, tile in run}, key=cost)
    return [member for member in run if len(member[1].positions) <= most]
