"""The KV cache of one sequence: contiguous, charged in pages of 512 slots to a pool with a fixed capacity.

Slot p holds key and value of the token at position p. Pending chains lie in place, in the slots after `length`; a tree
lies in `Pending.tree_kv` [layers, 2, tokens, kv_heads, head_dim], because siblings share a position.

Memory in which the caches of many sequences lie side by side, so that one matrix product can attend to several.

A chunk holds slabs of one size; a slab is the memory of one cache. Free slabs are zeros and take no memory: a chunk is
address space, of which the system provides what has been written to and takes back what was freed.
"""

from __future__ import annotations

import heapq
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.errors import NoCapacity, is_out_of_memory
from moot.model.cache.base import KvCache, Pending
from moot.runtime.faults import fault

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


PAGE_SLOTS = 512
"""Slots are charged to the pool in multiples of this."""

SPAN_SLOTS = 256
"""Slots are allocated, and attended to in deterministic mode, in multiples of this."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's keys and values look like, equal in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvPool:
    """Accounting of slots: no cache grows past what is left of `capacity_tokens` (rounded up to whole pages).

    `arena`: where caches lie side by side; without one each has memory of its own.
    """

    def __init__(self, shape: KvShape, capacity_tokens: int, arena: Arena | None = None) -> None:
        self.shape = shape
        self.arena = arena
        self.capacity_tokens = round_up(capacity_tokens, PAGE_SLOTS)
        self.used_tokens = 0

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.used_tokens

    def take(self, num_slots: int) -> None:
        if num_slots > self.free_tokens:
            raise NoCapacity(f"KV cache is full: {num_slots} slots asked for, {self.free_tokens} free")
        self.used_tokens += num_slots

    def give_back(self, num_slots: int) -> None:
        self.used_tokens -= num_slots


class SequenceCache(KvCache):
    """`data` is [layers, 2, slots, kv_heads, head_dim], in memory heads before slots: what a head attends to lies in
    one piece, which matrix products take without copying it. All slots are finite numbers from the start (a masked slot
    gets weight 0, and 0 times NaN would be NaN; see `wipe` for tokens whose own numbers are not finite). `slab`: where
    in the pool's arena `data` lies, None for memory of its own."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.length = 0
        self.slab: Slab | None = None
        self.data = self._allocate(0)
        self.pending: Pending | None = None

    @property
    def num_slots(self) -> int:
        return round_up(self.data.shape[2], PAGE_SLOTS)

    @torch.inference_mode()
    def reserve(self, num_tokens: int) -> None:
        if num_tokens <= self.data.shape[2]:
            return
        missing = round_up(num_tokens, PAGE_SLOTS) - self.num_slots
        self._pool.take(missing)
        try:
            self._move(round_up(num_tokens, SPAN_SLOTS))
        except BaseException:
            self._pool.give_back(missing)
            raise

    def reserve_step(self, num_tokens: int, num_levels: int) -> None:
        self.reserve(self.length + num_levels)

    @torch.inference_mode()
    def _keep(self, pending: Pending, kept: Sequence[int]) -> None:
        if pending.tree_kv is not None:
            rows = torch.tensor(kept, device=self.data.device)
            self.data[:, :, self.length : self.length + len(kept)] = pending.tree_kv.index_select(2, rows)

    @torch.inference_mode()
    def _shrink(self) -> None:
        surplus = self.num_slots - round_up(self.length, PAGE_SLOTS)
        if surplus > PAGE_SLOTS:
            # One page of slack stays, so that a crop at a page border does not allocate twice.
            try:
                self._move(self.num_slots - surplus + PAGE_SLOTS)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Giving back takes memory first: what there is stays, and stays charged.
                return
            self._pool.give_back(surplus - PAGE_SLOTS)

    @torch.inference_mode()
    def wipe(self) -> None:
        self.pending = None
        self.data[:, :, self.length :] = 0

    @torch.inference_mode()
    def _read(self, start: int, end: int) -> Tensor:
        return self.data[:, :, start:end].clone()

    @torch.inference_mode()
    def _write(self, block: Tensor) -> None:
        self.data[:, :, self.length : self.length + block.shape[2]] = block

    @torch.inference_mode()
    def free(self) -> None:
        self._pool.give_back(self.num_slots)
        self.length = 0
        self._move(0)
        self.pending = None

    def _move(self, num_slots: int) -> None:
        """Into new memory, zeros but for the committed slots. The old memory is nobody's afterwards.

        Raises what the allocator does; then nothing has changed. Fault point: `kv.allocate=memory:SLOTS` (for more).
        """
        if (found := fault("kv.allocate")) and found.action == "memory" and num_slots > int(found.argument):
            raise MemoryError("fault point kv.allocate")
        old, slab = self.slab, self._new_slab(num_slots)
        data = self._allocate(num_slots) if slab is None else slab.data
        data[:, :, : self.length] = self.data[:, :, : self.length]
        self.data, self.slab = data, slab
        if old is not None and self._pool.arena is not None:
            self._pool.arena.give_back(old)

    def _new_slab(self, num_slots: int) -> Slab | None:
        if self._pool.arena is None:
            return None
        try:
            return self._pool.arena.take(num_slots)
        except OSError:
            # No address space for many caches: one cache's own memory may still be had, and its own error tells if not.
            return None

    @torch.inference_mode()
    def _allocate(self, num_slots: int) -> Tensor:
        shape = self._pool.shape
        return torch.zeros(
            shape.num_layers, 2, shape.num_kv_heads, num_slots, shape.head_dim, dtype=shape.dtype, device=shape.device
        ).transpose(2, 3)
