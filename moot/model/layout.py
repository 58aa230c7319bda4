"""The layout of a step: its rows, the tiles in which they attend, and the slots and masks of each tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moot.model.cache.contiguous import SPAN_SLOTS, SequenceCache, round_up
from moot.model.cache.kv_cache import Pending, is_chain, paths
from moot.model.rows import RowRules

STEP_ARGUMENT = "moot_step"


@dataclass(slots=True)
class Tile:
    """Query rows computed by one call. `rows`: their indices in the step, padded: for a chain by the rows that happen
    to follow, for a tree by repetition; `num_rows` of them count. `positions`: one for each of `rows`.

    `path`: pending indices of the whole path whose tail must lie in the slots, None for a chain. `masks`: one for each
    sliding window that a layer asks for (None: full attention).
    """

    rows: slice | Tensor
    num_rows: int
    positions: Sequence[int]
    kv_length: int
    path: Tensor | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def own_rows(self) -> slice | Tensor:
        """`rows` without those that only pad."""
        if isinstance(self.rows, slice):
            return slice(self.rows.start, self.rows.start + self.num_rows)
        return self.rows[: self.num_rows]

    def mask(self, window: int | None, like: Tensor, group: int = 1) -> Tensor:
        """What is added to scores so that a row sees its own position and, within `window`, those before it: 0 or -inf,
        [rows * group, kv_length]."""
        if window not in self.masks:
            rows = torch.tensor(self.positions, device=like.device).repeat_interleave(group)[:, None]
            slots = torch.arange(self.kv_length, device=like.device)
            hidden = slots > rows
            if window is not None:
                hidden |= slots <= rows - window
            zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self.masks[window] = zeros.masked_fill_(hidden, -torch.inf)
        return self.masks[window]


@dataclass(slots=True)
class Segment:
    """The tokens of one request in the step: rows start..start + count of it. No tiles where rules say `by_row`."""

    cache: SequenceCache
    start: int
    count: int
    parents: Sequence[int]
    tree_kv: Tensor | None
    """As of the cache's pending tokens, which these are."""
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """What a layer calls its attention with: the factor of its scores (None: 1 / sqrt(dim)), its sliding window, and
    the cap of its scores."""

    scaling: float | None
    window: int | None
    softcap: float | None = None


@dataclass(slots=True)
class Step:
    """Layout of one forward pass. `layers_seen` collects what the probe wants to know about the model."""

    segments: list[Segment]
    progress: Callable[[], None]
    layers_seen: dict[int, AttentionArguments] = field(default_factory=dict)


def plan_segment(
    cache: SequenceCache, start: int, parents: Sequence[int], depths: Sequence[int], rules: RowRules
) -> Segment:
    """Lay out one request's tokens and make them the cache's pending ones. The cache must have room for them."""
    count, device, tree_kv = len(parents), cache.data.device, None
    if not is_chain(depths):
        layers, two, _, heads, dim = cache.data.shape
        tree_kv = cache.data.new_zeros(layers, two, count, heads, dim)
    cache.pending = Pending(parents, tree_kv)
    tiles: list[Tile] = []
    segment = Segment(cache, start, count, parents, tree_kv, tiles)
    if rules.by_row:
        return segment
    groups: list[tuple[list[int], list[int] | None]] = [(list(range(count)), None)]
    if tree_kv is not None:
        groups = [(new, path) for path, new in paths(parents)]
    groups = [(rows, path) for whole, path in groups for rows in _pieces(whole, cache.length + depths[whole[0]], rules)]
    for rows, path in groups:
        last = depths[rows[-1]]
        kv_length = cache.length + last + 1
        if rules.pad_kv:
            kv_length = round_up(kv_length, SPAN_SLOTS)
        padding = rules.attention.rows(len(rows)) - len(rows)
        padded = rows + [rows[-1]] * padding
        positions = [cache.length + depths[row] for row in padded]
        if path is None:
            tiles.append(Tile(slice(start + rows[0], start + rows[0] + len(padded)), len(rows), positions, kv_length))
        else:
            index = torch.tensor([start + row for row in padded], device=device)
            tiles.append(Tile(index, len(rows), positions, kv_length, torch.tensor(path, device=device)))
    return segment


def num_step_rows(segments: Sequence[Segment], rules: RowRules) -> int:
    """Rows that the whole step must have so that all products and all tiles are padded by rows that exist."""
    last = segments[-1]
    ends = [tile.rows.stop for segment in segments for tile in segment.tiles if isinstance(tile.rows, slice)]
    return rules.step_rows(max([last.start + last.count, *ends]))


def _pieces(rows: list[int], position: int, rules: RowRules) -> list[list[int]]:
    """`rows`, of which the first stands at `position` and each at the next one, cut into tiles.

    Where attention reads whole spans of slots, no tile crosses a span's end: how many slots a row sees is decided by
    its own position, not by the rows beside it.
    """
    pieces: list[list[int]] = []
    first = 0
    while first < len(rows):
        room = SPAN_SLOTS - (position + first) % SPAN_SLOTS if rules.pad_kv else len(rows)
        last = min(first + rules.tile, first + room, len(rows))
        pieces.append(rows[first:last])
        first = last
    return pieces
