"""Chunks between the generations of one request and whoever writes its answer: bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from services.router.types import GenerationChunk

ItemT = TypeVar("ItemT")

_FRAME_BYTES = 256
"""Of an event around what it carries."""
_ID_BYTES, _LOGPROB_BYTES = 8, 64


def size_of(chunk: GenerationChunk) -> int:
    """About what a chunk takes in an answer, in bytes."""
    entries = sum(1 + len(entry.top) for entry in chunk.logprobs)
    return _FRAME_BYTES + 4 * len(chunk.text) + _ID_BYTES * len(chunk.token_ids) + _LOGPROB_BYTES * entries


class ChunkQueue(Generic[ItemT]):
    """Several writers, one reader, one event loop. Holds at most `max_bytes` and the chunk that went over it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[ItemT, int]] = deque()
        self._num_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()

    async def put(self, item: ItemT, num_bytes: int = 0) -> None:
        """Waits while `max_bytes` are there."""
        while self._num_bytes >= self._max_bytes:
            self._room.clear()
            await self._room.wait()
        self._items.append((item, num_bytes))
        self._num_bytes += num_bytes
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> ItemT:
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item, num_bytes = self._items.popleft()
        self._num_bytes -= num_bytes
        if self._num_bytes < self._max_bytes:
            self._room.set()
        return item
