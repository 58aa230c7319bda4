"""The drafting thread: takes commands between two pieces of work, and sleeps when there is neither. See drafting.py.

Any thread submits; sessions and drafter are touched by the engine's thread only. One ask waits per session: a newer
one takes its place, so what waits is bounded by the number of sessions, and the queue of commands has its own bound.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from moot.core.errors import NoCapacity
from moot.drafters.interface import Drafter
from moot.runtime.metrics import Metrics
from moot.runtime.worker import WorkerThread
from services.drafter.config import DrafterConfig
from services.drafter.drafter_commands import Close, Command, OpenSession, Propose, Stream, Unknown
from services.drafter.drafter_sessions import PendingAsk
from services.drafter.drafting import AnswerQueue, Drafting

HOUSEKEEPING_S = 1.0
"""Longest sleep of the idle thread: how late an idle session may be closed."""


class DrafterEngine:
    """The engine of a drafter, which it owns from `start` on."""

    def __init__(
        self,
        drafter: Drafter[Any],
        config: DrafterConfig,
        metrics: Metrics,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._stopping = threading.Event()
        self._answer_queue = AnswerQueue()
        self._drafting = Drafting(drafter, config, metrics, vocab_size, self._answer_queue, clock, self._stopping)
        self._table = self._drafting.table
        self._condition = threading.Condition()
        self._inbox: deque[tuple[Stream, Command | None]] = deque()
        self._num_queued: Counter[int] = Counter()
        self._busy_since: float | None = None
        self._worker: WorkerThread | None = None

    @property
    def num_sessions(self) -> int:
        return len(self._table)

    @property
    def is_running(self) -> bool:
        return self._worker is not None and self._worker.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and has not been busy with one batch for longer than the stall limit."""
        since = self._busy_since
        stalled = since is not None and self._clock() - since > self._config.service.stall_limit_s
        return self.is_running and not stalled

    def start(self, worker: WorkerThread | None = None) -> None:
        """Draft on `worker` from now on, the thread that made the drafter. It ends with the engine."""
        self._worker = worker or WorkerThread("drafter")
        self._worker.submit(self._run)
        self._worker.finish()

    def stop(self) -> None:
        """End the thread; waits at most `stop_timeout_s`. Sessions are closed by the thread before it ends."""
        self._stopping.set()
        with self._condition:
            self._condition.notify()
        if self._worker is not None:
            self._worker.join(self._config.service.stop_timeout_s)

    def submit(self, stream: Stream, commands: Sequence[Command]) -> None:
        """Queue commands in order. Raises NoCapacity when too many of this stream wait: it is to be ended."""
        with self._condition:
            if self._num_queued[id(stream)] + len(commands) > self._config.service.max_queued_commands:
                raise NoCapacity(f"more than {self._config.service.max_queued_commands} commands wait")
            self._num_queued[id(stream)] += len(commands)
            self._inbox.extend((stream, command) for command in commands)
            self._condition.notify()

    def end(self, stream: Stream) -> None:
        """End a stream: free all its sessions. Never refused."""
        with self._condition:
            self._inbox.append((stream, None))
            self._condition.notify()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._busy_since = self._clock()
                self._take_commands()
                if self._drafting.step():
                    self._answer_queue.deliver()
                else:
                    self._rest()
        finally:
            self._busy_since = None
            self._table.close_all()
            self._metrics.num_sessions.set(0)

    def _rest(self) -> None:
        if self._table.close_idle(self._clock() - self._config.service.session_idle_limit_s):
            self._metrics.num_sessions.set(len(self._table))
        self._busy_since = None
        with self._condition:
            if not self._inbox and not self._stopping.is_set():
                self._condition.wait(HOUSEKEEPING_S)

    def _take_commands(self) -> None:
        with self._condition:
            arrivals = list(self._inbox)
            self._inbox.clear()
            self._num_queued.clear()
        for stream, command in arrivals:
            try:
                self._take(stream, command)
            except Exception as error:  # noqa: BLE001 - a kind's defect ends the session it met, not the service
                self._drafting.fail(error, [] if command is None else [(stream, command.session_id)])
                if isinstance(command, Propose):
                    self._answer_queue.put(stream, Unknown(command.session_id, command.round_index))
        if arrivals:
            self._metrics.num_sessions.set(len(self._table))
            self._answer_queue.deliver()

    def _take(self, stream: Stream, command: Command | None) -> None:
        match command:
            case OpenSession():
                self._table.close(stream, command.session_id)
                if not self._table.open(stream, command, self._clock()):
                    self._metrics.asks_dropped.labels("capacity").inc()
            case Propose():
                self._take_ask(stream, command)
            case Close():
                self._table.close(stream, command.session_id)
            case None:
                for session in [session for session in self._table if session.stream is stream]:
                    self._table.close(stream, session.session_id)

    def _take_ask(self, stream: Stream, command: Propose) -> None:
        session = self._table.get(stream, command.session_id)
        added = command.committed_token_ids
        if session is None or session.length + len(added) != command.base_length:
            self._table.close(stream, command.session_id)
            self._answer_queue.put(stream, Unknown(command.session_id, command.round_index))
            return
        now = self._clock()
        self._table.touch(session, now)
        if added:
            self._drafter.extend(session.held, added, command.top_candidates)
            session.length = command.base_length
            self._drafting.settle(session.path.follow(added))
            session.is_followed = len(session.path) > 0
        if session.ask is not None:
            self._metrics.asks_dropped.labels("superseded").inc()
        session.asked = command
        if command.is_answered:
            self._drafting.go_on(session)
            return
        expires_at = now + command.deadline_ms / 1000 if command.deadline_ms else None
        session.ask = PendingAsk(expires_at)
        self._drafting.begin(session)
