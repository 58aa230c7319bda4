"""One verifier pod over gRPC: one stream, its sessions, heartbeats. All of them: verifier_pool.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from moot.core.errors import DeadlineExceeded, Draining, PeerLost
from moot.core.types import Draft, Verification
from moot.metrics import Metrics
from moot.rpc import convert
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc
from services.router.heartbeats import Heartbeats
from services.router.links import LinkPolicy, PeerLink, PeerState, new_session_id
from services.router.pool import DraftPool
from services.router.ports import Prefix
from services.router.target_policy import TargetPolicy
from services.router.verifier_facts import VerifierFacts, checked, failure_of
from services.router.verify_sessions import VerifySession

_log = logging.getLogger("moot.router.verifiers")


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
        self.probation = asyncio.Lock()
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
        if prefix.inside is not None:
            opening.inside_drafter_ids.extend(prefix.inside.drafter_ids)
            opening.inside_width = prefix.inside.width
            opening.num_inside_tokens = prefix.inside.num_tokens
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
        """Its address is gone: nothing new is opened here, and the stream ends when the last session has moved.

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
        """What the end of its stream means for a session: nobody lost a verifier that was taken away, or went."""
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
            failed = answer.failed
            if failed.code == pb.SessionFailed.CODE_DRAINING:
                self._go_away()
            self.detach(session)
            session.fail(failure_of(failed, session.is_opening))
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
        """Once per interval: did it answer, does its compute thread move, does anybody wait too long."""
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
        """Free a session on the verifier. One that it has ended by itself, or that was lost, is known to be gone."""
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
