"""Attention of several requests in one call: which tiles go together, and the call.

Requests whose caches lie in neighbouring slabs of a chunk are one batch of matrix products. A slab between them that
has no part in the step is computed for nothing, which costs a fraction of a call. Row counts and numbers of slabs come
from short lists, so that the check at start can try them all: they are rounded up.

The paths of a tree take the same slots, one after the other: the first of all trees are computed together, then the
second ones, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from moot.model.arena import Chunk, Slab
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
