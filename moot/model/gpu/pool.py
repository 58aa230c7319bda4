"""KV in pages on the device: a pool of pages, and caches that own some of them.

A page holds 512 consecutive positions of one sequence. Behind the pages lie a scratch area, in which a step lays out
the paths of trees, and the trash page, which takes what padding rows write and is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moot.model.cache.contiguous import PAGE_SLOTS, KvPool, KvShape, round_up
from moot.model.cache.kv_cache import KvCache, Pending

SCRATCH_SLOTS = 16_384
"""Slots for the paths of one step's trees; a step that needs more is refused, and then tried in parts."""


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """`values` on `device`, without waiting for it: a GPU copies from pinned memory when its stream gets there."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class PagedPool(KvPool):
    """`layers[i]` is [2, slots, kv_heads, head_dim]: keys and values of layer i, all pages in one row of slots."""

    def __init__(self, shape: KvShape, capacity_tokens: int) -> None:
        super().__init__(shape, capacity_tokens)
        self.scratch_start = self.capacity_tokens
        self.scratch_slots = min(SCRATCH_SLOTS, self.capacity_tokens)
        self.trash = self.scratch_start + self.scratch_slots
        num_slots = self.trash + PAGE_SLOTS
        self.layers = [
            torch.zeros(2, num_slots, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
            for _ in range(shape.num_layers)
        ]
        self._free = list(range(self.capacity_tokens // PAGE_SLOTS))[::-1]

    def take_pages(self, count: int) -> list[int]:
        """Take pages from the pool. Raises NoCapacity; then nothing has changed."""
        self.take(count * PAGE_SLOTS)
        return [self._free.pop() for _ in range(count)]

    def return_pages(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)
        self.give_back(len(pages) * PAGE_SLOTS)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots in all layers; all are read before any is written."""
        pairs = upload(np.array([sources, targets], dtype=np.int64), self.shape.device)
        for layer in self.layers:
            layer.index_copy_(1, pairs[1], layer.index_select(1, pairs[0]))


class PagedCache(KvCache):
    """A sequence's pages.

    Pending token i lies in the slot of position length + i, whether it belongs to a chain or to a tree. `commit` of a
    tree notes which slots must be moved; that is done with the next step, or before anything else reads them.
    """

    def __init__(self, pool: PagedPool) -> None:
        self.store = pool
        self.length = 0
        self.pages: list[int] = []
        self.pending: Pending | None = None
        self._moves: list[tuple[int, int]] = []

    @property
    def num_slots(self) -> int:
        return len(self.pages) * PAGE_SLOTS

    def slots(self, start: int, end: int) -> np.ndarray:
        """Slots of the positions start..end, int64."""
        positions = np.arange(start, end, dtype=np.int64)
        pages = np.array(self.pages, dtype=np.int64)
        return pages[positions // PAGE_SLOTS] * PAGE_SLOTS + positions % PAGE_SLOTS

    def reserve(self, num_tokens: int) -> None:
        missing = round_up(num_tokens, PAGE_SLOTS) // PAGE_SLOTS - len(self.pages)
        if missing > 0:
            self.pages += self.store.take_pages(missing)

    def reserve_step(self, num_tokens: int, num_levels: int) -> None:
        # Siblings share a position, but each has a slot until it is known which of them stays.
        self.reserve(self.length + num_tokens)

    def _keep(self, pending: Pending, kept: Sequence[int]) -> None:
        slots = self.slots(self.length, self.length + len(pending.parents))
        for target, source in enumerate(kept):
            if source != target:
                self._moves.append((int(slots[source]), int(slots[target])))

    def take_moves(self) -> list[tuple[int, int]]:
        """Moves that `commit` left to be done, source and target slot: the caller does them now."""
        moves, self._moves = self._moves, []
        return moves

    @torch.inference_mode()
    def settle(self) -> None:
        if moves := self.take_moves():
            self.store.move(*zip(*moves, strict=True))

    def _shrink(self) -> None:
        self.settle()
        # One page of slack stays, so that a crop at a page border does not take and return the same page for ever.
        keep = round_up(self.length, PAGE_SLOTS) // PAGE_SLOTS + 1
        self.store.return_pages(self.pages[keep:])
        del self.pages[keep:]

    @torch.inference_mode()
    def wipe(self) -> None:
        self.settle()
        self.pending = None
        rows = upload(self.slots(self.length, self.num_slots), self.store.shape.device)
        for layer in self.store.layers:
            layer.index_fill_(1, rows, 0)

    @torch.inference_mode()
    def _read(self, start: int, end: int) -> Tensor:
        self.settle()
        rows = upload(self.slots(start, end), self.store.shape.device)
        return torch.stack([layer.index_select(1, rows) for layer in self.store.layers])

    @torch.inference_mode()
    def _write(self, block: Tensor) -> None:
        self.settle()
        rows = upload(self.slots(self.length, self.length + block.shape[2]), self.store.shape.device)
        for layer, part in zip(self.store.layers, block, strict=True):
            layer.index_copy_(1, rows, part)

    def free(self) -> None:
        self._moves.clear()
        self.store.return_pages(self.pages)
        self.pages = []
        self.length = 0
        self.pending = None
