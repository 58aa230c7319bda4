"""The compute thread: one thread that does all of a process's computing, from loading the model to its last step.

One thread, because OpenMP keeps a team of threads for each thread that computes: with a second team there are more
threads than cores, and then libgomp lets a waiting thread sleep at once instead of watching for the next piece of work.
Waking it takes longer than many of a forward pass's pieces: measured, a quarter of the time of a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class WorkerThread:
    """Runs what is submitted, in order. A daemon: a stuck call does not keep the process from ending.

    It starts with the first call, and ends after `finish` when the calls before it are done.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Callable[[], ResultT]) -> Future[ResultT]:
        """Submit a call; the future gets its result or exception."""
        future: Future[ResultT] = Future()
        self._calls.put((future, call))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def finish(self) -> None:
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the result
                future.set_exception(error)
