"""A bounded queue whose reader takes all that is there at once, as far as one message holds it: few frames."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

ITEM_OVERHEAD_BYTES = 16
"""More than what a repeated field adds to each of its messages: a tag and a length."""


class FrameQueueFull(Exception):
    """The reader does not keep up: whoever owns the stream ends it, which frees everything behind it."""


class FrameQueue(Generic[ItemT]):
    """One event loop, any number of writers, one reader.

    `put` never waits: past `max_items` it raises FrameQueueFull. `next_frame` waits for at least one item and returns
    up to `max_frame_items` of them, fewer when they would be more than `max_frame_bytes` together (an item that is
    larger than that comes alone); after `close` it drains what is left, then returns an empty list. `size_of`: an
    item's bytes.
    """

    def __init__(
        self,
        max_items: int = 8192,
        max_frame_items: int = 256,
        max_frame_bytes: int = 0,
        size_of: Callable[[ItemT], int] = lambda item: 0,
    ) -> None:
        self._items: deque[ItemT] = deque()
        self._max_items = max_items
        self._max_frame_items = max_frame_items
        self._max_frame_bytes = max_frame_bytes
        self._size_of = size_of
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, item: ItemT) -> None:
        if self._closed:
            return
        if len(self._items) >= self._max_items:
            raise FrameQueueFull(f"{self._max_items} items wait to be written")
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def next_frame(self) -> list[ItemT]:
        while not self._items and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        frame: list[ItemT] = []
        num_bytes = 0
        while self._items and len(frame) < self._max_frame_items:
            num_bytes += self._size_of(self._items[0]) + ITEM_OVERHEAD_BYTES
            if frame and 0 < self._max_frame_bytes < num_bytes:
                break
            frame.append(self._items.popleft())
        return frame

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
