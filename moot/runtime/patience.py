"""A bound for waits of equal length, of which hardly any lasts so long, with one timer for all of them."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Patience:
    """A bound for waits of equal length. `with patience.wait():` raises TimeoutError in a body that waits longer than
    `timeout_s`, as asyncio.timeout.

    That makes and cancels a timer for each wait, which costs more than most waits of a round do. Here all waits are
    equally long, so that they are due in the order in which they began, and one timer looks at the oldest. Of one
    event loop; close it, or the timer outlives its last wait by up to `timeout_s`.
    """

    __slots__ = ("_loop", "_timer", "_waits", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waits: dict[Wait, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> Wait:
        """The context manager of one wait of the present task."""
        return Wait(self)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, wait: Wait) -> float:
        """Begin a wait; returns when it is due, in the loop's time."""
        due = self._loop.time() + self.timeout_s
        self._waits[wait] = None
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._look)
        return due

    def _end(self, wait: Wait) -> None:
        self._waits.pop(wait, None)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for wait in list(self._waits):
            if wait.due > now:
                self._timer = self._loop.call_at(wait.due, self._look)
                return
            del self._waits[wait]
            wait.expire()


class Wait:
    """One wait of one task."""

    __slots__ = ("_cancelling", "_expired", "_patience", "_task", "due")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # a wait is one of a task
        self._task = task
        self._cancelling = task.cancelling()
        self.due = self._patience._begin(self)

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patience._end(self)
        # Not when the task was cancelled by somebody else as well: that one must be heard.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
