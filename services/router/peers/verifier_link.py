"""One verifier pod over gRPC: one stream, its sessions, heartbeats. All of them: targets.py.

`Heartbeats` say whether a verifier is alive: whether it answers, and whether its compute thread moves while something
waits for it. `TargetPolicy` bounds everything that waits for a verifier. `VerifierFacts` are what a verifier says of
itself; `checked` is what its answers must be. `VerifySession` is one request on one verifier: which answer it waits
for, and until when.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from moot.core.errors import (
    DeadlineExceeded,
    Draining,
    MootError,
    PeerError,
    PeerLost,
    UnknownSession,
)
from moot.core.generation import is_path
from moot.core.options import Options, option, option_of
from moot.core.types import Draft, ModelInfo, Verification
from moot.rpc import convert
from moot.rpc.link import HEARTBEAT_INTERVAL_S
from moot.runtime.metrics import Metrics
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc
from services.router.generation.ports import Prefix
from services.router.generation.request_types import RefusalOptions
from services.router.peers.draft_pool import DraftPool
from services.router.peers.links import LinkPolicy, PeerLink, PeerState, new_session_id

_log = logging.getLogger("moot.router.verifiers")


class Heartbeats:
    """The heartbeats of one stream: `hear` every answer to a beat, `judge` once per interval."""

    def __init__(self, max_missed: int, metrics: Metrics) -> None:
        self._max_missed = max_missed
        self._metrics = metrics
        self._heard = True
        self._num_missed = 0
        self._num_stuck = 0
        self._last_step = -1
        self._judged_step = -1
        self._num_queued = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the verifier has missed one or stood still for one, and is not given up yet."""
        return self._num_missed > 0 or self._num_stuck > 0

    def hear(self, heartbeat: pb.Heartbeat) -> None:
        self._heard = True
        self._last_step = heartbeat.step_counter
        self._num_queued = heartbeat.num_queued

    def judge(self) -> str | None:
        """Judge at the end of an interval. Returns why the verifier is lost; None: it is not."""
        self._num_missed = 0 if self._heard else self._num_missed + 1
        if not self._heard:
            self._metrics.heartbeats_missed.labels("missed").inc()
        stuck = self._num_queued > 0 and self._last_step == self._judged_step
        self._num_stuck = self._num_stuck + 1 if stuck else 0
        if stuck:
            self._metrics.heartbeats_missed.labels("stuck").inc()
        self._heard, self._judged_step = False, self._last_step
        if max(self._num_missed, self._num_stuck) < self._max_missed:
            return None
        word = "missed" if self._num_missed >= self._max_missed else "without progress"
        return f"{self._max_missed} heartbeats {word}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy(Options):
    """Options that bound every wait for a verifier; durations in seconds."""

    heartbeat_interval_s: float = option(HEARTBEAT_INTERVAL_S, help="seconds between heartbeats to a verifier", above=0)
    max_missed_heartbeats: int = option(
        3, help="heartbeats in a row, missed or without progress, until a verifier is given up", minimum=1
    )
    open_timeout_s: float = option(
        300.0, help="seconds that a verifier may take to read a prompt, time in its queue included", above=0
    )
    verify_timeout_s: float = option(
        60.0, help="seconds that a verifier may take to answer a draft, time in the pool included", above=0
    )
    no_verifier_wait_s: float = option(
        10.0, help="seconds a request waits while no verifier can take it; then 503", above=0
    )
    retry_after_s: float = option_of(RefusalOptions, "retry_after_s")
    capacity_retry_s: float = option(0.1, help="seconds until a full verifier is asked again", above=0)
    max_moves: int = option(3, help="verifiers that one request may lose and still move on", minimum=0)
    max_losses: int = option(
        2, help="verifiers lost while computing a request until the request is not tried again", minimum=1
    )
    suspect_wait_s: float = option(
        5.0, help="seconds that a suspect request waits for a verifier without another suspect", above=0
    )
    max_shortages: int = 3
    """Verifiers without memory for a request, one after the other, until it fails."""


@dataclass(frozen=True, slots=True)
class AttachedFacts:
    """A drafter attached to a verifier."""

    drafter_id: str
    kind: str
    family: str


@dataclass(frozen=True, slots=True)
class VerifierFacts:
    """The facts that Describe told of the verifier at one address."""

    info: ModelInfo
    numerics_fingerprint: str
    max_num_seqs: int
    max_draft_tokens: int
    kv_capacity_tokens: int
    batch_invariant: bool
    drafters: tuple[AttachedFacts, ...] = ()
    """Those that live inside it."""
    max_waiting_seqs: int = 0
    """Sessions beyond `max_num_seqs` that it lets wait; 0: it has not said."""

    @classmethod
    def from_pb(cls, answer: pb.DescribeVerifierResponse) -> VerifierFacts:
        return cls(
            info=convert.model_info_from_pb(answer.model),
            numerics_fingerprint=answer.numerics_fingerprint,
            max_num_seqs=max(1, answer.max_num_seqs),
            max_draft_tokens=answer.max_draft_tokens,
            kv_capacity_tokens=answer.kv_capacity_tokens,
            batch_invariant=answer.deterministic,
            drafters=tuple(AttachedFacts(one.drafter_id, one.kind, one.family or one.kind) for one in answer.drafters),
            max_waiting_seqs=answer.max_waiting_seqs,
        )


def failure_of(failed: pb.SessionFailed, is_opening: bool) -> MootError:
    """The error for a session that its verifier gave up."""
    error = convert.failed_from_pb(failed)
    if isinstance(error, UnknownSession) and is_opening:
        # It cannot fail to know what it is being told: count it among the verifier's own faults.
        return PeerError(str(error))
    return error


def checked(verification: Verification, draft: Draft, vocab_size: int | None) -> Verification:
    """The `verification` of `draft`, if it keeps the contract. Raises ValueError: a verifier that breaks the contract
    is not used further."""
    output, accepted = verification.output_token_ids, verification.num_accepted
    if not accepted <= len(output) <= accepted + 1 or accepted > len(draft):
        raise ValueError("the counts of tokens do not fit")
    if not is_path(draft, output[:accepted]):
        raise ValueError("the accepted tokens are no path of the draft")
    if verification.finish_reason is None and len(output) != accepted + 1:
        raise ValueError("no next token, and no end")
    if vocab_size is not None and output and max(output) >= vocab_size:
        raise ValueError("an id outside the vocabulary")
    return verification


class VerifySession:
    """One request on one verifier; at most one command of it is unanswered at a time."""

    __slots__ = (
        *("_answered", "_base_length", "_deadline", "_future", "_prefix", "_round_index"),
        *("draft", "link", "is_blameless", "session_id"),
    )

    def __init__(self, link: VerifierLink, session_id: int, prefix: Prefix) -> None:
        self.link = link
        self._prefix = prefix
        self.session_id = session_id
        self.draft = Draft()
        self.is_blameless = False
        """Whether the loss of the verifier cannot be this session's doing: it was ailing already when the last command
        was sent to it, or it was given up for what the router had queued."""
        self._round_index = -1
        self._base_length = 0
        self._deadline = 0.0
        self._future: asyncio.Future[Verification] | None = None
        self._answered = False

    @property
    def is_opening(self) -> bool:
        return self._round_index < 0

    @property
    def is_computing(self) -> bool:
        """Whether the verifier works on a command of this session."""
        return self._future is not None and not self._future.done()

    def expect(self, round_index: int, base_length: int, draft: Draft, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._round_index, self._base_length, self.draft = round_index, base_length, draft
        self._deadline = loop.time() + timeout_s
        self._future = loop.create_future()
        self.is_blameless = self.link.is_in_doubt

    @property
    def is_alive(self) -> bool:
        """Whether the verifier still has the session, as far as is known."""
        return self.link.holds(self)

    def verify(self, draft: Draft, base_length: int, timeout_s: float) -> None:
        """Send a draft; its place in the pool must be reserved. Raises PeerLost."""
        round_index = self._round_index + 1
        self.link.pool.enter(self.session_id)
        attached = self._prefix.attached
        command = convert.draft_to_pb(draft, round_index, base_length, attached.num_tokens if attached else 0)
        self.link.send(
            pb.VerifyCommand(session_id=self.session_id, verify=command),
            self._prefix.heard_at,
        )
        self.expect(round_index, base_length, draft, timeout_s)

    async def answer(self) -> Verification:
        """The answer to the last command. Raises what the failure codes and the loss of the link stand for."""
        if self._future is None:
            raise UnknownSession("nothing was asked")
        try:
            verification = await self._future
        finally:
            self._future = None
        if verification.finish_reason is not None:
            self.link.detach(self)
        return verification

    def waits_for(self, round_index: int, base_length: int, link: VerifierLink) -> bool:
        """Whether this is the answer that is awaited; any other is counted and dropped."""
        if round_index != self._round_index or base_length != self._base_length:
            link.drop("stale")
            return False
        if not self.is_computing:
            link.drop("duplicate")
            return False
        return True

    def resolve(self, verification: Verification) -> None:
        self.link.pool.leave(self.session_id)
        self._prefix.heard_at = self.link.read_at
        if self._future is not None and not self._future.done():
            self._future.set_result(verification)

    def fail(self, error: Exception) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)

    def is_overdue(self, now: float) -> bool:
        return self.is_computing and now > self._deadline


class VerifierLink(PeerLink[pb.VerifyCommand]):
    """One verifier. `admit` judges what Describe said and raises PeerRefused; `facts` is set once it was admitted."""

    role = "verifier"

    def __init__(
        self,
        address: str,
        policy: LinkPolicy,
        target_policy: TargetPolicy,
        admit: Callable[[str, VerifierFacts], None],
        metrics: Metrics,
        on_state: Callable[[], None],
    ) -> None:
        super().__init__(address, policy, on_state, metrics.round_turn_seconds.labels("verify"))
        self.facts: VerifierFacts | None = None
        self.pool = DraftPool(1)
        self.suspect = asyncio.Lock()
        """Held by the one request that may try here alone, after it was there when another verifier died."""
        self._target_policy = target_policy
        self._admit = admit
        self._metrics = metrics
        self._sessions: dict[int, VerifySession] = {}
        self._beat_timer: asyncio.TimerHandle | None = None
        self._heartbeats = self._new_heartbeats()
        self._retired = False
        self._goes_away = False
        """It has said so, on this stream."""
        self._left_by_all = asyncio.Event()

    @property
    def load(self) -> int:
        return len(self._sessions)

    @property
    def is_in_doubt(self) -> bool:
        """Whether it has missed a heartbeat or stood still for one, and is not given up yet."""
        return self._heartbeats.is_in_doubt

    def open(self, prefix: Prefix, num_top_candidates: int) -> VerifySession:
        """Send an opening; `VerifySession.answer` waits for it. Raises PeerLost."""
        session = VerifySession(self, new_session_id(), prefix)
        command = pb.VerifyCommand(session_id=session.session_id)
        opening = command.open
        opening.request_id = prefix.request_id
        opening.prompt_token_ids.extend(prefix.prompt_token_ids)
        opening.output_token_ids.extend(prefix.output_token_ids)
        opening.sampling.CopyFrom(convert.sampling_to_pb(prefix.params))
        opening.cache_salt = prefix.cache_salt
        opening.num_top_candidates = num_top_candidates
        opening.traceparent = prefix.traceparent
        if prefix.attached is not None:
            opening.inside_drafter_ids.extend(prefix.attached.drafter_ids)
            opening.inside_width = prefix.attached.width
            opening.num_inside_tokens = prefix.attached.num_tokens
        self.send(command)
        session.expect(-1, len(prefix), Draft(), self._target_policy.open_timeout_s)
        self._sessions[session.session_id] = session
        return session

    def holds(self, session: VerifySession) -> bool:
        return self._sessions.get(session.session_id) is session

    def detach(self, session: VerifySession) -> None:
        self._sessions.pop(session.session_id, None)
        self.pool.leave(session.session_id)
        if not self._sessions:
            self._left_by_all.set()

    async def retire(self) -> None:
        """Retire a verifier whose address is gone: nothing new is opened here, and the stream ends when the last
        session has moved.

        Bounded by the longest command; a session that is idle even then moves when its request goes on.
        """
        self._retired = self._stopped = True
        if self.state is PeerState.READY:
            self._set_state(PeerState.DRAINING)
        if self._sessions:
            self._left_by_all.clear()
            longest_s = max(self._target_policy.open_timeout_s, self._target_policy.verify_timeout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    await self._left_by_all.wait()
        await self.stop()

    def loss(self, reason: str) -> PeerLost | Draining:
        """The error that the end of the stream means for a session: a verifier that was taken away, or went, is not
        lost."""
        problem = f"verifier {self.address}: {reason}"
        return Draining(problem) if self._retired or self._goes_away else PeerLost(problem)

    def drop(self, reason: str) -> None:
        """Count an answer that fitted no open wait."""
        self._metrics.answers_dropped.labels(self.role, reason).inc()

    async def _describe(self, channel: grpc.aio.Channel) -> None:
        answer = await verifier_service_pb2_grpc.VerifierServiceStub(channel).Describe(pb.DescribeVerifierRequest())
        facts = VerifierFacts.from_pb(answer)
        self._admit(self.address, facts)
        self.facts = facts
        self.pool = DraftPool(facts.max_num_seqs, self._metrics.pool_depth.inc)

    def _open_stream(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Any, Any]:
        self._heartbeats = self._new_heartbeats()
        self._goes_away = False
        self._schedule_beat()
        return verifier_service_pb2_grpc.VerifierServiceStub(channel).Verify()

    def _frame(self, commands: list[pb.VerifyCommand]) -> pb.VerifyRequest:
        return pb.VerifyRequest(commands=commands)

    def _dispatch(self, response: pb.VerifyResponse) -> None:
        for answer in response.answers:
            kind = answer.WhichOneof("answer")
            if kind == "heartbeat":
                self._heartbeats.hear(answer.heartbeat)
            elif kind == "drain":
                self._go_away()
            elif (session := self._sessions.get(answer.session_id)) is None:
                self.drop("stale")
            else:
                try:
                    self._answer(session, kind, answer)
                except ValueError as error:
                    raise PeerLost(f"sent an answer that makes no sense ({error})") from error

    def _answer(self, session: VerifySession, kind: str | None, answer: pb.VerifyAnswer) -> None:
        if kind == "verified":
            message = answer.verified
            if session.waits_for(message.round_index, message.base_length, self):
                session.resolve(self._checked(convert.verified_from_pb(message), session))
        elif kind == "opened":
            if session.waits_for(-1, answer.opened.base_length, self):
                session.resolve(self._checked(convert.opened_from_pb(answer.opened), session))
        elif kind == "failed":
            error = failure_of(answer.failed, session.is_opening)
            if isinstance(error, Draining):
                self._go_away()
            self.detach(session)
            session.fail(error)
        else:
            raise ValueError("an answer without content")

    def _go_away(self) -> None:
        self._goes_away = True
        if self.state is PeerState.READY:
            self._set_state(PeerState.DRAINING)

    def _checked(self, verification: Verification, session: VerifySession) -> Verification:
        return checked(verification, session.draft, self.facts.info.vocab_size if self.facts else None)

    def _lost(self, reason: str) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None
        sessions, self._sessions = self._sessions, {}
        if sessions:
            _log.warning("verifier lost", extra={"address": self.address, "reason": reason, "sessions": len(sessions)})
        for session in sessions.values():
            session.fail(self.loss(reason))
        self.pool.clear()
        self._left_by_all.set()

    def _overflow(self, reason: str) -> None:
        # The router's own queue is full: whatever was being computed is not why.
        for session in self._sessions.values():
            session.is_blameless = True
        super()._overflow(reason)

    def _new_heartbeats(self) -> Heartbeats:
        return Heartbeats(self._target_policy.max_missed_heartbeats, self._metrics)

    def _schedule_beat(self) -> None:
        interval = self._target_policy.heartbeat_interval_s
        self._beat_timer = asyncio.get_running_loop().call_later(interval, self._beat)

    def _beat(self) -> None:
        """Judge the verifier once per interval: whether it answers, its compute thread moves, and no session waits too
        long."""
        if (reason := self._heartbeats.judge()) is not None:
            self.break_stream(reason)
            return
        now = asyncio.get_running_loop().time()
        for session in [session for session in self._sessions.values() if session.is_overdue(now)]:
            self.end(session, aborted=True)
            session.fail(DeadlineExceeded("the verifier did not answer in time"))
        self._schedule_beat()
        try:
            self.send(pb.VerifyCommand(heartbeat=pb.Heartbeat()))
        except PeerLost:
            _log.debug("no heartbeat sent", extra={"address": self.address})

    def end(self, session: VerifySession, *, aborted: bool) -> None:
        """Free a session on the verifier. A session that the verifier has ended by itself, or that was lost, is known
        to be gone."""
        if not self.holds(session):
            return
        self.detach(session)
        command = pb.VerifyCommand(session_id=session.session_id)
        if aborted:
            command.abort.SetInParent()
        else:
            command.finish.SetInParent()
        try:
            self.send(command)
        except PeerLost:
            _log.debug("session ended on a lost verifier", extra={"address": self.address})
