"""One drafter pod over gRPC: one stream for all requests, its sessions, its strikes. Pools: drafter_pools.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from moot.core.errors import PeerLost, PeerRefused
from moot.metrics import Metrics
from moot.rpc import convert
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc
from services.router.draft_sessions import DraftSession
from services.router.links import LinkPolicy, PeerLink, PeerState, new_session_id
from services.router.strikes import StrikePolicy, Strikes

_log = logging.getLogger("moot.router.drafters")


class DrafterLink(PeerLink[pb.DraftCommand]):
    """One replica. `fingerprint()` is the target's tokenizer fingerprint, against which the replica's is compared."""

    role = "drafter"

    def __init__(
        self,
        drafter_id: str,
        address: str,
        policy: LinkPolicy,
        strikes: StrikePolicy,
        fingerprint: Callable[[], str],
        metrics: Metrics,
        on_state: Callable[[], None],
        on_described: Callable[[str, str], None],
    ) -> None:
        """`on_described` is told drafter id and family whenever the replica was asked what it is."""
        super().__init__(address, policy, on_state, metrics.round_turn_seconds.labels("propose"))
        self._on_described = on_described
        self.drafter_id = drafter_id
        self.kind = ""
        self.family = ""
        self.context_limit = 0
        self._strikes = Strikes(strikes)
        self._fingerprint = fingerprint
        self._metrics = metrics
        self._sessions: dict[int, DraftSession] = {}
        self._quiet_since: float | None = None
        self._return_timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return len(self._sessions)

    def attach(self, session: DraftSession) -> int:
        session_id = new_session_id()
        self._sessions[session_id] = session
        return session_id

    def detach(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)
        self._leave_if_drained()

    def drop(self, reason: str) -> None:
        """Count an answer that had no vote."""
        self._metrics.proposals_dropped.labels(self.drafter_id, reason).inc()

    def asked(self, now: float) -> None:
        if self._quiet_since is None:
            self._quiet_since = now

    def is_quiet(self) -> bool:
        """Whether it has answered nobody for longer than reading a long prompt may take."""
        now = asyncio.get_running_loop().time()
        return self._quiet_since is not None and now - self._quiet_since > self._strikes.policy.warm_up_s

    def answered(self) -> None:
        self._strikes.answered()

    def strike(self, reason: str, asked_at: float) -> None:
        """`reason`: "missed", or why an answer was malformed. The third strike ejects this replica for a while."""
        now = asyncio.get_running_loop().time()
        judge = self._strikes.missed if reason == "missed" else self._strikes.malformed
        duration = judge(asked_at, now)
        if duration is None or self.state is not PeerState.READY:
            return
        _log.warning("drafter ejected", extra={"drafter": self.drafter_id, "reason": reason, "seconds": duration})
        self._metrics.drafter_ejections.labels(self.drafter_id).inc()
        self._set_state(PeerState.EJECTED)
        self._forget_sessions("ejected", tell=True)
        self._return_timer = asyncio.get_running_loop().call_later(duration, self._come_back)

    def _come_back(self) -> None:
        self._return_timer = None
        if self.state is PeerState.EJECTED:
            self._set_state(PeerState.READY)

    async def _describe(self, channel: grpc.aio.Channel) -> None:
        stub = drafter_service_pb2_grpc.DrafterServiceStub(channel)
        answer = await stub.Describe(pb.DescribeDrafterRequest())
        info, expected = convert.model_info_from_pb(answer.model), self._fingerprint()
        if not expected:
            raise PeerLost("the target's tokenizer is not known yet")
        # A kind without a model and without tables has no tokenizer of its own: it only repeats ids that it was told.
        if info.tokenizer_fingerprint not in ("", expected):
            raise PeerRefused(
                f"drafter {self.drafter_id} at {self.address} has tokenizer {info.tokenizer_fingerprint} "
                f"({info.vocab_size} ids), the target has {expected}"
            )
        self.kind, self.family = answer.kind, answer.family or self.drafter_id
        self.context_limit = info.context_limit
        self._on_described(self.drafter_id, self.family)

    def _open_stream(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Any, Any]:
        return drafter_service_pb2_grpc.DrafterServiceStub(channel).Draft()

    def _frame(self, commands: list[pb.DraftCommand]) -> pb.DraftRequest:
        return pb.DraftRequest(commands=commands)

    def _dispatch(self, response: pb.DraftResponse) -> None:
        self._quiet_since = None
        for answer in response.answers:
            kind = answer.WhichOneof("answer")
            if kind == "drain":
                self._drain()
                continue
            session = self._sessions.get(answer.session_id)
            if session is None:
                self.drop("stale")
            elif kind == "proposed":
                session.on_proposed(answer.proposed)
            elif kind == "ahead":
                session.on_ahead(answer.ahead)
            elif kind == "unknown_session":
                session.on_unknown()
            else:
                self.drop("malformed")
                self.strike("malformed", session.asked_at)

    def _drain(self) -> None:
        # What runs is answered until the stream ends; the next question of each session goes to another replica.
        if self.state in (PeerState.READY, PeerState.EJECTED):
            self._set_state(PeerState.DRAINING)
        self._leave_if_drained()

    def _leave_if_drained(self) -> None:
        if self.state is PeerState.DRAINING and not self._sessions:
            # The replica ends as soon as its peers have gone, and waits for them until then.
            self.leave()

    def _lost(self, reason: str) -> None:
        if self._return_timer is not None:
            self._return_timer.cancel()
            self._return_timer = None
        self._forget_sessions("lost", tell=False)

    def _forget_sessions(self, reason: str, *, tell: bool) -> None:
        sessions, self._sessions = self._sessions, {}
        for session_id, session in sessions.items():
            session.on_lost(reason)
            if tell:
                self.say_end(session_id, aborted=True)

    def say_end(self, session_id: int, *, aborted: bool) -> None:
        """Tell the replica to free a session; one that is lost has freed it already."""
        command = pb.DraftCommand(session_id=session_id)
        if aborted:
            command.abort.SetInParent()
        else:
            command.finish.SetInParent()
        try:
            self.send(command)
        except PeerLost:
            _log.debug("session ended on a lost drafter", extra={"drafter": self.drafter_id})
