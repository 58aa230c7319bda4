"""The pool of drafts to verify, as this router sees one verifier's.

The verifier takes up to a batch of drafts at each step; those that come meanwhile wait. A draft sent while nothing
runs is taken at once; when the running ones have been answered, the waiting ones are taken. A place in the pool is
reserved before drafting begins: while as many drafts as the batch holds wait or are being made, drafting pauses for
the requests behind them. So `depth`, the number of waiting drafts, never exceeds the batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from moot.core.errors import DeadlineExceeded


class DraftPool:
    """The places of drafts at one verifier, keyed by session id. `on_depth` is told every change of the depth, as a
    difference."""

    def __init__(self, batch_size: int, on_depth: Callable[[int], None] = lambda change: None) -> None:
        if batch_size < 1:
            raise ValueError("a batch holds at least one draft")
        self._batch_size = batch_size
        self._on_depth = on_depth
        self._running: set[int] = set()
        self._waiting: dict[int, None] = {}
        self._reserved: set[int] = set()
        self._paused: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def depth(self) -> int:
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def num_held(self) -> int:
        """Places in use, of any sort: 0 when every request has ended."""
        return len(self._running) + len(self._waiting) + len(self._reserved)

    async def reserve(self, session_id: int, timeout_s: float) -> None:
        """Reserve a place for the draft that this session makes next; waits for one, first come first served.

        Raises DeadlineExceeded after `timeout_s`. Reserving again what is reserved changes nothing.
        """
        if session_id in self._reserved:
            return
        if not self._paused and self._num_free > 0:
            self._reserved.add(session_id)
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        entry = (session_id, waiter)
        self._paused.append(entry)
        timer = loop.call_later(timeout_s, _expire, waiter)
        try:
            await waiter
        except BaseException:
            if entry in self._paused:
                self._paused.remove(entry)
            else:
                self.leave(session_id)
            raise
        finally:
            timer.cancel()

    def enter(self, session_id: int) -> None:
        """Note that the draft is sent, which uses up the reservation."""
        if session_id not in self._reserved:
            raise ValueError("no place in the pool is reserved for this session")
        self._reserved.discard(session_id)
        if self._running:
            self._waiting[session_id] = None
            self._on_depth(1)
        else:
            self._running.add(session_id)
            self._admit()

    def leave(self, session_id: int) -> None:
        """Free a place: the draft was answered or dropped, or its session is gone. Calling it twice is harmless."""
        self._reserved.discard(session_id)
        self._running.discard(session_id)
        if session_id in self._waiting:
            del self._waiting[session_id]
            self._on_depth(-1)
        if not self._running and self._waiting:
            taken = list(self._waiting)[: self._batch_size]
            for waiting in taken:
                del self._waiting[waiting]
            self._running.update(taken)
            self._on_depth(-len(taken))
        self._admit()

    def clear(self) -> None:
        """Free all places: the verifier is gone. Paused requests go on, and find it lost."""
        if self._waiting:
            self._on_depth(-len(self._waiting))
        self._running.clear()
        self._waiting.clear()
        self._reserved.clear()
        while self._paused:
            _release(self._paused.popleft()[1])

    @property
    def _num_free(self) -> int:
        return self._batch_size - len(self._waiting) - len(self._reserved)

    def _admit(self) -> None:
        while self._paused and self._num_free > 0:
            session_id, waiter = self._paused.popleft()
            if not waiter.done():
                self._reserved.add(session_id)
                waiter.set_result(None)


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(DeadlineExceeded("no room in the pool of drafts to verify"))
