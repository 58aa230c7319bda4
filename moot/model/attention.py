"""Attention of a ragged step: all requests' tokens lie in one row of tokens, each attends to its own request's cache.

transformers' model classes call a registered function with the keyword arguments of the model's call, so the step's
layout travels as `moot_step`. A token attends to its request's committed slots and to its own ancestors, nothing else.

A tree is computed as the chains it consists of: for each root-to-leaf path the tail is gathered into the slots after
the committed ones, and the rows that no earlier path had are computed against it. So each row sees exactly the slots,
in the same order, that it would see in a chain, and rounds the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from moot.core.errors import ModelRefused
from moot.model.cache import Pending
from moot.model.determinism import RowRules
from moot.model.kv import SPAN_SLOTS, SequenceCache, round_up
from moot.model.softcap import softcapped_attention
from moot.model.trees import is_chain, paths

ATTENTION_NAME = "moot_ragged"
STEP_ARGUMENT = "moot_step"


def additive_mask(positions: Tensor, kv_length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that a row sees its own position and, within `window`, those before it: 0 or -inf.

    positions: [..., rows], int64. Returns [..., rows, kv_length].
    """
    slots, rows = torch.arange(kv_length, device=positions.device), positions[..., None]
    hidden = slots > rows
    if window is not None:
        hidden |= slots <= rows - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


@dataclass(slots=True)
class Tile:
    """Query rows computed by one call. `rows`: their indices in the step, padded: for a chain by the rows that happen
    to follow, for a tree by repetition; `num_rows` of them count. `positions`: one for each of `rows`.

    `path`: pending indices of the whole path whose tail must lie in the slots, None for a chain. Masks are additive,
    [rows, kv_length], one for each sliding window that a layer asks for (None: full attention).
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

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        if window not in self.masks:
            positions = torch.tensor(self.positions, device=like.device)
            self.masks[window] = additive_mask(positions, self.kv_length, window, like.dtype)
        return self.masks[window]


@dataclass(slots=True)
class Segment:
    """The tokens of one request in the step: rows start..start + count of it. No tiles where rules say `by_row`."""

    cache: SequenceCache
    start: int
    count: int
    is_chain: bool
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """What a layer calls its attention with: the factor of its scores (None: 1 / sqrt(dim)), its sliding window, and
    the cap of its scores (softcap.py)."""

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
    count, device = len(parents), cache.data.device
    groups: list[tuple[list[int], list[int] | None]]
    chain = is_chain(depths)
    if chain:
        cache.pending = Pending(parents, None)
        groups = [(list(range(count)), None)]
    else:
        layers, two, _, heads, dim = cache.data.shape
        cache.pending = Pending(parents, cache.data.new_zeros(layers, two, count, heads, dim))
        groups = [(new, path) for path, new in paths(parents)]
    if rules.by_row:
        return Segment(cache, start, count, chain, [])
    groups = [(rows, path) for whole, path in groups for rows in _pieces(whole, cache.length + depths[whole[0]], rules)]
    tiles = []
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
    return Segment(cache, start, count, chain, tiles)


def num_step_rows(segments: Sequence[Segment], rules: RowRules) -> int:
    """Rows that the whole step must have so that all products and all tiles are padded by rows that exist."""
    last = segments[-1]
    ends = [tile.rows.stop for segment in segments for tile in segment.tiles if isinstance(tile.rows, slice)]
    return rules.step_rows(max([last.start + last.count, *ends]))


def _pieces(rows: list[int], position: int, rules: RowRules) -> list[list[int]]:
    """`rows`, of which the first stands at `position` and each at the next one, cut into tiles.

    Where whole spans are attended to, no tile crosses a span's end: how many slots a row sees is decided by its own
    position, not by the rows beside it.
    """
    pieces: list[list[int]] = []
    first = 0
    while first < len(rows):
        room = SPAN_SLOTS - (position + first) % SPAN_SLOTS if rules.pad_kv else len(rows)
        last = min(first + rules.tile, first + room, len(rows))
        pieces.append(rows[first:last])
        first = last
    return pieces


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function. query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], rotated.

    Returns [1, tokens, heads, dim]. Writes the tokens' keys and values into their caches' pending slots.
    """
    step: Step | None = kwargs.get(STEP_ARGUMENT)
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelRefused(f"attention with {name} is not supported")
    if step is None or attention_mask is not None:
        raise ModelRefused("the model does not pass the step's layout on to its attention function")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every module with an AttentionInterface has its index
    arguments = AttentionArguments(scaling, sliding_window, kwargs.get("softcap"))
    step.layers_seen[layer] = arguments
    queries = query[0].transpose(0, 1)  # [tokens, heads, dim]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    # Rows that only pad belong to nobody and get zeros.
    output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for segment in step.segments:
        own = slice(segment.start, segment.start + segment.count)
        cache = segment.cache
        slots = cache.data[layer]  # [2, slots, kv_heads, dim]
        tree_kv = _store(segment, slots, keys[own], values[own], layer)
        placed: Tensor | None = None
        for tile in segment.tiles:
            if tree_kv is not None and tile.path is not None and tile.path is not placed:
                slots[:, cache.length : cache.length + len(tile.path)] = tree_kv.index_select(1, tile.path)
                placed = tile.path
            attended = slots[:, : tile.kv_length].transpose(1, 2)  # [2, kv_heads, kv_length, dim]
            mask = tile.mask(sliding_window, query)
            result = attend(queries[tile.rows].transpose(0, 1), attended[0], attended[1], mask, arguments)
            output[tile.own_rows] = result[:, : tile.num_rows].transpose(0, 1)
            step.progress()
    return output[None], None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, arguments: AttentionArguments) -> Tensor:
    """query [heads, rows, dim], key and value [kv_heads, slots, dim], additive mask [rows, slots]. Returns what the
    query's shape is. `arguments`: its window is in the mask already."""
    if arguments.softcap is not None:
        scaling = query.shape[-1] ** -0.5 if arguments.scaling is None else arguments.scaling
        return softcapped_attention(query, key, value, mask, scaling, arguments.softcap)
    grouped = query.shape[0] != key.shape[0]
    return scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=arguments.scaling, enable_gqa=grouped
    )[0]


def _store(segment: Segment, slots: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor | None:
    """Write the segment's keys and values [tokens, kv_heads, dim] to where its pending tokens lie."""
    pending = segment.cache.pending
    if pending is None or pending.tree_kv is None:
        first = segment.cache.length
        slots[0, first : first + segment.count] = keys
        slots[1, first : first + segment.count] = values
        return None
    tree_kv = pending.tree_kv[layer]
    tree_kv[0] = keys
    tree_kv[1] = values
    return tree_kv


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The step's layout says who attends to whom; transformers need not build a mask."""


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
