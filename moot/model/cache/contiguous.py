"""The KV cache of one sequence: contiguous, charged in pages of 512 slots to a pool with a fixed capacity.

Slot p holds key and value of the token at position p. Pending chains lie in place, in the slots after `length`; a tree
lies in `Pending.tree_kv` [layers, 2, tokens, kv_heads, head_dim], because siblings share a position.

On a CPU a cache is address space of its own, of which the system provides what is written to and takes all back when
the cache ends: caches hold what the pool has charged and no more.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.errors import NoCapacity, is_out_of_memory
from moot.model.cache.kv_cache import KvCache, Pending
from moot.runtime.faults import fault

PAGE_SLOTS = 512
"""Slots are charged to the pool in multiples of this."""

SPAN_SLOTS = 256
"""Slots are allocated, and attended to in batch-invariant mode, in multiples of this."""


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
    """Accounting of slots: no cache grows past what is left of `capacity_tokens` (rounded up to whole pages)."""

    def __init__(self, shape: KvShape, capacity_tokens: int) -> None:
        self.shape = shape
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
    gets weight 0, and 0 times NaN would be NaN; see `wipe` for tokens whose own numbers are not finite)."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.length = 0
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
        """Move into new memory, zeros but for the committed slots. The old memory is free afterwards.

        Raises what the allocator does; then nothing has changed. Fault point: `kv.allocate=memory:SLOTS` (for more).
        """
        if (found := fault("kv.allocate")) and found.action == "memory" and num_slots > int(found.argument):
            raise MemoryError("fault point kv.allocate")
        data = self._allocate(num_slots)
        data[:, :, : self.length] = self.data[:, :, : self.length]
        self.data = data

    @torch.inference_mode()
    def _allocate(self, num_slots: int) -> Tensor:
        shape = self._pool.shape
        sizes = (shape.num_layers, 2, shape.num_kv_heads, num_slots, shape.head_dim)
        if not num_slots or shape.device.type != "cpu":
            return torch.zeros(sizes, dtype=shape.dtype, device=shape.device).transpose(2, 3)
        memory = mmap.mmap(-1, num_slots * shape.bytes_per_token, mmap.MAP_PRIVATE | mmap.MAP_ANON)
        return torch.frombuffer(memory, dtype=shape.dtype).view(sizes).transpose(2, 3)
