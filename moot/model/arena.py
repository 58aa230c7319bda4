"""Memory in which the caches of many sequences lie side by side, so that one matrix product can attend to several.

A chunk holds slabs of one size; a slab is the memory of one cache. Free slabs are zeros and take no memory: a chunk is
address space, of which the system provides what has been written to and takes back what was freed.
"""

from __future__ import annotations

import heapq
import mmap
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moot.model.kv import KvShape

MOST_SLAB_SLOTS = 2048
"""Caches of more slots have memory of their own: with so much to attend to, one call for several saves nothing."""

_CHUNK_SLOTS = 16_384
_RETURNS_ZEROS = sys.platform == "linux"
"""Elsewhere pages that were given back need not read as zeros."""


def slabs_per_chunk(slots: int) -> int:
    return _CHUNK_SLOTS // slots


class Chunk:
    """`data` is [layers, 2, slabs, kv_heads, slots, head_dim]. Raises OSError where there is no address space."""

    def __init__(self, shape: KvShape, slots: int) -> None:
        self.slots = slots
        self.num_slabs = slabs_per_chunk(slots)
        sizes = (shape.num_layers, 2, self.num_slabs, shape.num_kv_heads, slots, shape.head_dim)
        self._memory = mmap.mmap(-1, self.num_slabs * slots * shape.bytes_per_token, mmap.MAP_PRIVATE | mmap.MAP_ANON)
        self.data = torch.frombuffer(self._memory, dtype=shape.dtype).view(sizes)
        self._free = list(range(self.num_slabs))

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_unused(self) -> bool:
        return len(self._free) == self.num_slabs

    def take(self) -> Slab:
        """The first free slab: the fewer gaps, the more caches one product can take."""
        return Slab(self, heapq.heappop(self._free))

    def give_back(self, index: int) -> None:
        """The slab reads as zeros afterwards."""
        slab = self.data[:, :, index]
        size = slab[0, 0].numel() * slab.itemsize
        if _RETURNS_ZEROS and size % mmap.PAGESIZE == 0:
            for piece in range(slab.shape[0] * 2):
                self._memory.madvise(mmap.MADV_DONTNEED, (piece * self.num_slabs + index) * size, size)
        else:
            slab.zero_()
        heapq.heappush(self._free, index)


class Slab:
    """The memory of one cache, number `index` of its chunk."""

    __slots__ = ("chunk", "index")

    def __init__(self, chunk: Chunk, index: int) -> None:
        self.chunk = chunk
        self.index = index

    @property
    def data(self) -> Tensor:
        """[layers, 2, slots, kv_heads, head_dim], in memory heads before slots."""
        return self.chunk.data[:, :, self.index].transpose(2, 3)


class Arena:
    """Hands out slabs of any number of slots up to MOST_SLAB_SLOTS. Not thread-safe: one compute thread."""

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        self._chunks: dict[int, list[Chunk]] = {}

    @property
    def num_chunks(self) -> int:
        return sum(map(len, self._chunks.values()))

    def take(self, slots: int) -> Slab | None:
        """A slab of zeros, or None for a size that is not laid out side by side. Raises OSError."""
        if not 0 < slots <= MOST_SLAB_SLOTS:
            return None
        chunks = self._chunks.setdefault(slots, [])
        chunk = next((chunk for chunk in chunks if not chunk.is_full), None)
        if chunk is None:
            chunk = Chunk(self._shape, slots)
            chunks.append(chunk)
        return chunk.take()

    def give_back(self, slab: Slab) -> None:
        """Nobody reads the slab any more. A chunk that nobody uses goes back to the system."""
        slab.chunk.give_back(slab.index)
        if slab.chunk.is_unused:
            self._chunks[slab.chunk.slots].remove(slab.chunk)
