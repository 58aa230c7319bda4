"""The drafting thread: takes commands, drafts for all waiting sessions together, and drafts ahead while idle.

Any thread submits; sessions and proposer are touched by the engine's thread only. One ask waits per session: a newer
one takes its place, so what waits is bounded by the number of sessions, and the queue of commands has its own bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from moot.core.errors import NoCapacity
from moot.metrics import Metrics
from moot.proposers.base import Ask, Chain, Proposer
from moot.worker import WorkerThread
from services.drafter import faults
from services.drafter.commands import Answer, Close, Command, Open, Propose, Proposed, Stream, Unknown
from services.drafter.config import DrafterConfig
from services.drafter.sessions import PendingAsk, Session, SessionTable

_log = logging.getLogger("moot.drafter")

HOUSEKEEPING_S = 1.0
"""Longest sleep of the idle thread: how late an idle session may be closed."""


class DrafterEngine:
    """Owns the proposer from `start` on."""

    def __init__(
        self,
        proposer: Proposer[Any],
        config: DrafterConfig,
        metrics: Metrics,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = proposer
        self._config = config
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._clock = clock
        self._table = SessionTable(proposer, config.max_num_seqs)
        self._waiting: dict[int, Session] = {}
        self._condition = threading.Condition()
        self._inbox: deque[tuple[Stream, Command | None]] = deque()
        self._num_queued: Counter[int] = Counter()
        self._ahead = config.draft_ahead_tokens
        self._stopping = threading.Event()
        self._busy_since: float | None = None
        self._worker: WorkerThread | None = None
        self._answers: defaultdict[int, list[Answer]] = defaultdict(list)
        self._streams: dict[int, Stream] = {}

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
        stalled = since is not None and self._clock() - since > self._config.stall_limit_s
        return self.is_running and not stalled

    def start(self, worker: WorkerThread | None = None) -> None:
        """Draft on `worker` from now on, the thread that made the proposer. It ends with the engine."""
        self._worker = worker or WorkerThread("drafter")
        self._worker.submit(self._run)
        self._worker.finish()

    def stop(self) -> None:
        """End the thread; waits at most `stop_timeout_s`. Sessions are closed by the thread before it ends."""
        self._stopping.set()
        with self._condition:
            self._condition.notify()
        if self._worker is not None:
            self._worker.join(self._config.stop_timeout_s)

    def submit(self, stream: Stream, commands: Sequence[Command]) -> None:
        """Queue commands in order. Raises NoCapacity when too many of this stream wait: it is to be ended."""
        with self._condition:
            if self._num_queued[id(stream)] + len(commands) > self._config.max_queued_commands:
                raise NoCapacity(f"more than {self._config.max_queued_commands} commands wait")
            self._num_queued[id(stream)] += len(commands)
            self._inbox.extend((stream, command) for command in commands)
            self._condition.notify()

    def end(self, stream: Stream) -> None:
        """The stream is over: free all its sessions. Never refused."""
        with self._condition:
            self._inbox.append((stream, None))
            self._condition.notify()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._busy_since = self._clock()
                self._take_commands()
                if not (self._draft_waiting() or self._work_ahead()):
                    self._rest()
        finally:
            self._busy_since = None
            self._table.close_all()
            self._metrics.num_sessions.set(0)

    def _rest(self) -> None:
        if self._table.close_idle(self._clock() - self._config.session_idle_limit_s):
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
                self._fail(error, [] if command is None else [(stream, command.session_id)])
                if isinstance(command, Propose):
                    self._answer(stream, Unknown(command.session_id, command.round_index))
        if arrivals:
            self._metrics.num_sessions.set(len(self._table))
            self._deliver()

    def _take(self, stream: Stream, command: Command | None) -> None:
        match command:
            case Open():
                self._drop(self._table.get(stream, command.session_id))
                if not self._table.open(stream, command, self._clock()):
                    self._metrics.asks_dropped.labels("capacity").inc()
            case Propose():
                self._take_ask(stream, command)
            case Close():
                self._drop(self._table.get(stream, command.session_id))
            case None:
                for session in [session for session in self._table if session.stream is stream]:
                    self._drop(session)

    def _drop(self, session: Session | None) -> None:
        if session is not None:
            self._waiting.pop(id(session), None)
            self._table.close(session.stream, session.session_id)

    def _fail(self, error: Exception, sessions: Sequence[tuple[Stream, int]]) -> None:
        """Log the defect and forget the sessions: their next ask is answered with unknown session."""
        _log.error("the proposer failed", exc_info=error, extra={"kind": self._proposer.kind})
        self._metrics.asks_dropped.labels("failed").inc(len(sessions))
        for stream, session_id in sessions:
            self._drop(self._table.get(stream, session_id))

    def _take_ask(self, stream: Stream, command: Propose) -> None:
        session = self._table.get(stream, command.session_id)
        added = command.committed_token_ids
        if session is None or session.length + len(added) != command.base_length:
            self._drop(session)
            self._answer(stream, Unknown(command.session_id, command.round_index))
            return
        now = self._clock()
        self._table.touch(session, now)
        if added:
            self._proposer.extend(session.held, added, command.top_candidates)
            session.length = command.base_length
            session.follow(added)
        if session.ask is not None:
            self._metrics.asks_dropped.labels("superseded").inc()
        expires_at = now + command.deadline_ms / 1000 if command.deadline_ms else None
        session.ask = PendingAsk(command, expires_at)
        num_tokens = self._bounded(session).num_speculative_tokens
        if command.width == 1 and len(session.path.token_ids) >= num_tokens > 0:
            self._metrics.draft_ahead_answers.inc()
            self._waiting.pop(id(session), None)
            session.path_goal = num_tokens + self._ahead
            self._answer_ask(session, [_cut(session.path, num_tokens)], 0)
        else:
            self._waiting[id(session)] = session

    def _draft_waiting(self) -> bool:
        """Draft one batch. False: nobody waits."""
        batch: list[Session] = []
        now = self._clock()
        while self._waiting and len(batch) < self._config.max_batch:
            session = self._waiting.pop(next(iter(self._waiting)))
            ask = session.ask
            if ask is None:
                continue
            if ask.expires_at is not None and now > ask.expires_at:
                session.ask = None
                self._metrics.asks_dropped.labels("expired").inc()
                continue
            batch.append(session)
        if not batch:
            return False
        delay_s = faults.delay_s([session.request_id for session in batch])
        if delay_s:
            self._stopping.wait(delay_s)
        start_ns = time.monotonic_ns()
        chains = self._chains_of(batch)
        drafted_ns = time.monotonic_ns() - start_ns
        self._metrics.draft_seconds.observe(drafted_ns / 1e9)
        for session, found in zip(batch, chains, strict=True):
            self._answer_ask(session, found, drafted_ns)
        self._deliver()
        return True

    def _chains_of(self, batch: Sequence[Session]) -> list[list[Chain]]:
        asks = [self._bounded(session) for session in batch]
        results = self._propose(batch, asks)
        for session, ask, chains in zip(batch, asks, results, strict=True):
            session.path, session.path_goal = Chain((), ()), 0
            if self._ahead and ask.width == 1 and chains:
                session.path, session.path_goal = chains[0], ask.num_speculative_tokens + self._ahead
        return results

    def _bounded(self, session: Session) -> Ask[Any]:
        assert session.ask is not None
        command = session.ask.command
        num_tokens = min(command.num_speculative_tokens, self._config.max_speculative_tokens)
        return Ask(session.held, num_tokens, min(command.width, self._config.max_width))

    def _propose(self, sessions: Sequence[Session], asks: Sequence[Ask[Any]]) -> list[list[Chain]]:
        try:
            return self._proposer.propose(asks)
        except Exception as error:  # noqa: BLE001 - a kind's defect ends the sessions it met, not the service
            self._fail(error, [(session.stream, session.session_id) for session in sessions])
            return [[] for _ in asks]

    def _answer_ask(self, session: Session, chains: list[Chain], drafted_ns: int) -> None:
        assert session.ask is not None
        command, session.ask = session.ask.command, None
        chains = faults.corrupted(chains, command, session.request_id, self._vocab_size)
        answer = Proposed(command.session_id, command.round_index, command.base_length, tuple(chains), drafted_ns)
        self._answer(session.stream, answer)

    def _work_ahead(self) -> bool:
        """One small piece of work nobody waits for: to prepare a new session, or one more token for some paths."""
        cold = next((session for session in self._table if not session.is_warm), None)
        if cold is not None:
            try:
                cold.is_warm = not self._proposer.warm(cold.held)
            except Exception as error:  # noqa: BLE001 - as in _propose
                self._fail(error, [(cold.stream, cold.session_id)])
            return True
        batch = [s for s in self._table if len(s.path.token_ids) < s.path_goal][: self._config.max_batch]
        if not batch:
            return False
        asks = [Ask(session.held, len(session.path.token_ids) + 1) for session in batch]
        for session, chains in zip(batch, self._propose(batch, asks), strict=True):
            if chains and len(chains[0].token_ids) > len(session.path.token_ids):
                session.path = chains[0]
            else:
                session.path_goal = 0
        return True

    def _answer(self, stream: Stream, answer: Answer) -> None:
        self._streams[id(stream)] = stream
        self._answers[id(stream)].append(answer)

    def _deliver(self) -> None:
        for key, answers in self._answers.items():
            self._streams[key].deliver(answers)
        self._answers.clear()
        self._streams.clear()


def _cut(chain: Chain, length: int) -> Chain:
    return Chain(chain.token_ids[:length], chain.confidences[:length])
