"""Where a layer's fresh keys and values go: into slots, and for trees beside them until they are committed.

Fresh ones are [2, rows, kv_heads, dim]: keys and values of all rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moot.model.arena import Chunk, Slab
from moot.model.attention import Segment
from moot.model.cache import Pending


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
