"""The KV cache of one sequence: contiguous, charged in pages of 512 slots to a pool with a fixed capacity.

Slot p holds key and value of the token at position p. A forward pass leaves its tokens *pending*; `commit` keeps the
ones that lie on the accepted path, compacted to the slots after `length`. Not thread-safe: one compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.errors import NoCapacity
from moot.core.types import ROOT
from moot.model.arena import Arena, Slab

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


class Pending:
    """Tokens of the last forward pass that are not committed yet.

    `parents[i]` < i is the parent of token i, or ROOT. A chain lies in place, in the slots after the cache's length;
    a tree lies in `tree_kv` [layers, 2, tokens, kv_heads, head_dim], because siblings share a position.
    """

    __slots__ = ("parents", "tree_kv")

    def __init__(self, parents: Sequence[int], tree_kv: Tensor | None) -> None:
        self.parents = parents
        self.tree_kv = tree_kv


class SequenceCache:
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
        """Slots charged to the pool: whole pages."""
        return round_up(self.data.shape[2], PAGE_SLOTS)

    @torch.inference_mode()
    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all. Raises NoCapacity or what the allocator does; then nothing has changed."""
        if num_tokens <= self.data.shape[2]:
            return
        missing = round_up(num_tokens, PAGE_SLOTS) - self.num_slots
        self._pool.take(missing)
        try:
            self._move(round_up(num_tokens, SPAN_SLOTS))
        except BaseException:
            self._pool.give_back(missing)
            raise

    @torch.inference_mode()
    def commit(self, kept: Sequence[int]) -> None:
        """Keep the pending tokens with these indices: a path from the root, each the parent of the next.

        All other pending tokens are dropped. Raises ValueError when `kept` is no such path.
        """
        pending, self.pending = self.pending, None
        if not kept:
            return
        if pending is None:
            raise ValueError("nothing is pending")
        parent = ROOT
        for index in kept:
            if not 0 <= index < len(pending.parents) or pending.parents[index] != parent:
                raise ValueError("the kept tokens are not a path from the root")
            parent = index
        if pending.tree_kv is not None:
            rows = torch.tensor(kept, device=self.data.device)
            self.data[:, :, self.length : self.length + len(kept)] = pending.tree_kv.index_select(2, rows)
        self.length += len(kept)

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        """Forget everything from position `length` on, pending tokens included. Pages above are given back."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} tokens to {length}")
        self.pending = None
        self.length = length
        surplus = self.num_slots - round_up(length, PAGE_SLOTS)
        if surplus > PAGE_SLOTS:
            # One page of slack stays, so that a crop at a page border does not allocate twice.
            self._move(self.num_slots - surplus + PAGE_SLOTS)
            self._pool.give_back(surplus - PAGE_SLOTS)

    @torch.inference_mode()
    def wipe(self) -> None:
        """Forget pending tokens, and clear what rejected ones have left in the slots after the committed ones."""
        self.pending = None
        self.data[:, :, self.length :] = 0

    @torch.inference_mode()
    def read_block(self, start: int, end: int) -> Tensor:
        """A copy of the committed slots start..end: [layers, 2, end - start, kv_heads, head_dim]."""
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"slots {start} to {end} are not committed ({self.length} are)")
        return self.data[:, :, start:end].clone()

    @torch.inference_mode()
    def append_block(self, block: Tensor) -> None:
        """Commit a block that `read_block` gave, computed at exactly these positions after the same prefix."""
        self.pending = None
        num_tokens = block.shape[2]
        self.reserve(self.length + num_tokens)
        self.data[:, :, self.length : self.length + num_tokens] = block
        self.length += num_tokens

    @torch.inference_mode()
    def free(self) -> None:
        """Give every slot back. The cache is empty afterwards and may be used again."""
        self._pool.give_back(self.num_slots)
        self.length = 0
        self._move(0)
        self.pending = None

    def _move(self, num_slots: int) -> None:
        """Into new memory, zeros but for the committed slots. The old memory is nobody's afterwards."""
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
