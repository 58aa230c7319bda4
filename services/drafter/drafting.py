"""The work of the drafting thread: asks first, then new sessions, then proposals drafted ahead of their ask.

Kinds that draft token by token are driven one step at a time, so that whatever comes in waits for one step at most: an
ask joins the batch at its next step, and drafting ahead ends between two tokens. Ahead means: one whole next proposal
and the target's own token before it, which is what can be used when the present one is accepted whole. Answers are
collected in an `AnswerQueue` while a piece of work is done, and delivered to their streams in one go.

The fault point `drafter.propose` makes a drafter slow, frozen, lying or talking garbage, for fault tests.
`delay:SECONDS` and `freeze` stand still before drafting; `lie` answers random ids; `garbage[:form]` answers what no
drafter may: form `range` (ids outside the vocabulary), `long` (more than asked for), `empty` (a proposal without ids),
`confidences` (too few of them); without a form, one after the other. `memory:SESSIONS` has no memory to draft for more
than so many at once. After `@` a request id limits it to that.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from moot.core.errors import is_out_of_memory
from moot.core.types import Proposal
from moot.drafters.interface import Ask, Drafter
from moot.runtime import tracing
from moot.runtime.faults import fault, fault_delay_s
from moot.runtime.metrics import Metrics
from services.drafter.config import DrafterConfig
from services.drafter.drafter_commands import Ahead, Answer, Propose, Proposed, Stream
from services.drafter.drafter_sessions import DrafterSession, SessionTable, Settled

_log = logging.getLogger("moot.drafter")

POINT = "drafter.propose"


def delay_s(request_ids: Sequence[str]) -> float:
    """Seconds to stand still before drafting for these requests."""
    return max((fault_delay_s(fault(POINT, request_id)) for request_id in request_ids), default=0.0)


def shortage(num_sessions: int) -> None:
    """Raises MemoryError where the fault leaves no memory for so many asks."""
    found = fault(POINT)
    if found is not None and found.action == "memory" and num_sessions > int(found.argument):
        raise MemoryError(f"fault point {POINT}")


def corrupted(chains: list[Proposal], ask: Propose, request_id: str, vocab_size: int) -> list[Proposal]:
    """`chains`, or what the fault makes of them."""
    found = fault(POINT, request_id)
    if found is None or found.action not in ("lie", "garbage"):
        return chains
    length = max(ask.num_speculative_tokens, 1)
    if found.action == "lie":
        rng = random.Random(ask.base_length)
        return [Proposal(tuple(rng.randrange(vocab_size) for _ in range(length)), (255,) * length)]
    forms = {
        "range": Proposal((vocab_size + 7,) * length, (255,) * length),
        "long": Proposal((0,) * (3 * length + 1), (255,) * (3 * length + 1)),
        "empty": Proposal((), ()),
        "confidences": Proposal((0,) * length, (255,) * (length - 1)),
    }
    return [forms[found.argument or list(forms)[ask.round_index % len(forms)]]]


class AnswerQueue:
    """Answers on their way to their streams. Not thread-safe: the engine's thread only."""

    def __init__(self) -> None:
        self._answers: dict[Stream, list[Answer]] = {}

    def put(self, stream: Stream, answer: Answer) -> None:
        self._answers.setdefault(stream, []).append(answer)

    def deliver(self) -> None:
        """Each stream gets its answers in one piece."""
        for stream, answers in self._answers.items():
            stream.deliver(answers)
        self._answers.clear()


FLAT_ROWS = 16
"""Rows of a step up to which one more costs about nothing (measured on CPU; more on a GPU): so far, sessions that draft
ahead ride along in the steps of those that are asked."""


def is_ahead_on(mode: str, device: str) -> bool:
    """Whether to draft ahead. `mode`: auto, on or off; `device`: the drafter's.

    auto: on for a device, which no CPU verifier can want, and where this process is pinned to fewer cores than the
    machine has: it was given cores of its own. Else drafter and verifier may share cores, and the verifier, for which
    all requests wait, would pay.
    """
    if mode != "auto":
        return mode == "on"
    if device != "cpu":
        return True
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


class Drafting:
    """The work of the drafting thread. Not thread-safe: the engine's thread only."""

    def __init__(
        self,
        drafter: Drafter[Any],
        config: DrafterConfig,
        metrics: Metrics,
        vocab_size: int,
        answer_queue: AnswerQueue,
        clock: Callable[[], float],
        stopping: threading.Event,
    ) -> None:
        self.table = SessionTable(drafter, config.max_num_seqs, self.settle)
        self._drafter = drafter
        self._config = config
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._answer_queue = answer_queue
        self._clock = clock
        self._stopping = stopping
        self._is_ahead_on = drafter.is_stepwise and is_ahead_on(config.draft_ahead, drafter.device)
        if drafter.is_stepwise:
            _log.info("draft ahead: %s", "on" if self._is_ahead_on else "off")

    def settle(self, settled: Settled) -> None:
        self._metrics.draft_ahead_used_tokens.inc(settled.num_used)
        self._metrics.draft_ahead_dropped_tokens.inc(settled.num_dropped)

    def begin(self, session: DrafterSession) -> None:
        """Begin a session's ask that has just come: answer it if what it wants is there, else let it wait for its
        batch."""
        ask = self._bounded(session)
        wanted = ask.num_speculative_tokens
        if ask.width == 1:
            self.settle(session.path.claim(wanted))
            if len(session.path) >= wanted > 0:
                self._metrics.draft_ahead_answers.inc()
                self._answer_from_path(session)
                return
        else:
            self.settle(session.path.clear())
        self.table.waiting[id(session)] = session

    def go_on(self, session: DrafterSession) -> None:
        """Go on with a session whose ask was answered out of what the router was told ahead: draft ahead of that."""
        assert session.asked is not None
        session.ask = None
        self.table.waiting.pop(id(session), None)
        wanted = min(session.asked.num_speculative_tokens, self._config.max_speculative_tokens)
        self.settle(session.path.claim(wanted))
        session.path.goal = _goal(wanted) if len(session.path) >= wanted else 0
        self._metrics.draft_ahead_answers.inc()

    def step(self) -> bool:
        """Do one bounded piece of work, the most urgent first. False: there is none."""
        asked = self._next_asked()
        if asked:
            self._draft_for(asked)
            return True
        if (cold := next((session for session in self.table if not session.is_warm), None)) is not None:
            self._warm(cold)
            return True
        ahead = self._wanting_more(self._config.max_batch)
        if ahead:
            self._advance([], ahead)
        return bool(ahead)

    def fail(self, error: Exception, sessions: Sequence[tuple[Stream, int]]) -> None:
        """Log the defect and forget the sessions: their next ask is answered with unknown session, and opens them anew
        with what memory there is by then."""
        if is_out_of_memory(error):
            # Its frames hold what had been allocated.
            error.__traceback__ = None
            _log.warning("no memory to draft", extra={"kind": self._drafter.kind, "num_sessions": len(sessions)})
            self._metrics.asks_dropped.labels("memory").inc(len(sessions))
        else:
            _log.error("the drafter failed", exc_info=error, extra={"kind": self._drafter.kind})
            self._metrics.asks_dropped.labels("failed").inc(len(sessions))
        for stream, session_id in sessions:
            self.table.close(stream, session_id)

    def _next_asked(self) -> list[DrafterSession]:
        """Sessions whose asks have waited longest, as many as a batch holds; asks whose time is over are dropped."""
        now = self._clock()
        batch: list[DrafterSession] = []
        for session in list(self.table.waiting.values()):
            assert session.ask is not None
            if session.ask.expires_at is not None and now > session.ask.expires_at:
                del self.table.waiting[id(session)]
                session.ask = None
                self._metrics.asks_dropped.labels("expired").inc()
            elif len(batch) < self._config.max_batch:
                batch.append(session)
        return batch

    def _draft_for(self, batch: Sequence[DrafterSession]) -> None:
        new = [(s.request_id, s.ask) for s in batch if s.ask is not None and not s.ask.started_ns]
        if wait_s := delay_s([request_id for request_id, _ in new]):
            self._stopping.wait(wait_s)
        for _, ask in new:
            ask.started_ns = time.monotonic_ns()
        stepwise = [session for session in batch if self._drafter.is_stepwise and self._bounded(session).width == 1]
        whole = [session for session in batch if session not in stepwise]
        if whole:
            found = self._propose(whole, [self._bounded(session) for session in whole])
            for session, chains in zip(whole, found, strict=True):
                self._answer(session, chains)
        if (cold := next((session for session in stepwise if not session.is_warm), None)) is not None:
            self._warm(cold)
        if ready := [session for session in stepwise if session.is_warm]:
            self._advance(ready, self._wanting_more(min(FLAT_ROWS, self._config.max_batch) - len(ready)))

    def _wanting_more(self, room: int) -> list[DrafterSession]:
        """Sessions to draft ahead for, those asked longest ago first: their next ask is the nearest."""
        if not self._is_ahead_on or room <= 0:
            return []
        return [session for session in self.table if session.ask is None and session.path.wants_more][:room]

    def _warm(self, session: DrafterSession) -> None:
        try:
            session.is_warm = not self._drafter.warm(session.held)
        except Exception as error:  # noqa: BLE001 - as in _propose
            asked = session.ask is not None
            self.fail(error, [(session.stream, session.session_id)])
            if asked:
                self._answer(session, [])

    def _advance(self, asked: Sequence[DrafterSession], ahead: Sequence[DrafterSession]) -> None:
        """Draft one more token for each session."""
        goals = [self._bounded(session).num_speculative_tokens for session in asked]
        asks = [Ask(session.held, min(len(session.path) + 1, goal)) for session, goal in zip(asked, goals, strict=True)]
        asks += [Ask(session.held, len(session.path) + 1, is_ahead=True) for session in ahead]
        found = self._propose([*asked, *ahead], asks)
        for session, goal, chains in zip(asked, goals, found, strict=False):
            grew = bool(chains) and session.path.grow(chains[0], is_ahead=False)
            if not grew or len(session.path) >= goal:
                self._answer_from_path(session)
        for session, chains in zip(ahead, found[len(asked) :], strict=True):
            if chains and session.path.grow(chains[0], is_ahead=True):
                self._metrics.draft_ahead_tokens.inc()
                if not session.path.wants_more:
                    self._tell_ahead(session)
            else:
                session.path.goal = 0

    def _bounded(self, session: DrafterSession) -> Ask[Any]:
        assert session.asked is not None
        command = session.asked
        num_tokens = min(command.num_speculative_tokens, self._config.max_speculative_tokens)
        return Ask(session.held, num_tokens, min(command.width, self._config.max_width))

    def _propose(self, sessions: Sequence[DrafterSession], asks: Sequence[Ask[Any]]) -> list[list[Proposal]]:
        """Proposals for asks; empty for all where the kind fails: its defect ends the sessions it met, not the
        service."""
        num_ahead = sum(ask.is_ahead for ask in asks)
        with tracing.span("draft", num_asked=len(asks) - num_ahead, num_ahead=num_ahead):
            try:
                shortage(len(asks))
                return self._drafter.propose(asks)
            except Exception as error:  # noqa: BLE001 - see above
                self.fail(error, [(session.stream, session.session_id) for session in sessions])
                return [[] for _ in asks]

    def _answer_from_path(self, session: DrafterSession) -> None:
        wanted = self._bounded(session).num_speculative_tokens
        head = session.path.head(wanted)
        session.path.goal = _goal(wanted) if head.token_ids else 0
        self._answer(session, [head] if head.token_ids else [])

    def _tell_ahead(self, session: DrafterSession) -> None:
        """Tell the router what is drafted ahead, where the text has gone along the path so far: its next question need
        not come here."""
        asked = session.asked
        if asked is None or not (asked.takes_ahead and session.is_followed and asked.width == 1):
            return
        (path,) = corrupted([session.path.chain], asked, session.request_id, self._vocab_size)
        self._answer_queue.put(session.stream, Ahead(asked.session_id, asked.round_index, asked.base_length, path))

    def _answer(self, session: DrafterSession, chains: list[Proposal]) -> None:
        assert session.ask is not None
        assert session.asked is not None
        command, ask, session.ask = session.asked, session.ask, None
        self.table.waiting.pop(id(session), None)
        drafted_ns = time.monotonic_ns() - ask.started_ns if ask.started_ns else 0
        if drafted_ns:
            self._metrics.draft_seconds.observe(drafted_ns / 1e9)
        chains = corrupted(chains, command, session.request_id, self._vocab_size)
        answer = Proposed(command.session_id, command.round_index, command.base_length, tuple(chains), drafted_ns)
        self._answer_queue.put(session.stream, answer)


def _goal(num_tokens: int) -> int:
    """How long a path gets after a proposal of so many: the target's own token, and one whole proposal more."""
    return 2 * num_tokens + 1
