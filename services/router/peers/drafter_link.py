"""One drafter pod over gRPC: one stream for all requests, its sessions, its failures. Pools: drafter_pools.py.

`DraftSession` is one request on one drafter replica: what it was told, what it was asked, and which answer fits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from moot.core.errors import BodyTooLarge, PeerLost, PeerRefused
from moot.core.types import Proposal
from moot.rpc import convert
from moot.runtime.metrics import Metrics
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc, token_pb2
from services.router.generation.ports import Prefix, ProposalCollector, RequestDrafter
from services.router.peers.links import LinkPolicy, PeerLink, PeerState, new_session_id
from services.router.peers.outlier_ejection import EjectionPolicy, OutlierEjection

_log = logging.getLogger("moot.router.drafters")

MAX_AHEAD = 3
"""Times K that a drafter may tell ahead: its proposal, the target's token and the next proposal."""


class DraftSession:
    """One request on one replica. `RequestDrafter` of ports.py is the pool's part in front of it."""

    __slots__ = (
        "_ahead",
        "_base_length",
        "_box",
        "_drafter",
        "_has_answered",
        "_known_length",
        "_prefix",
        "_question",
        "_reopened",
        "_round_index",
        "answer_seconds",
        "asked_at",
        "is_lost",
        "link",
        "session_id",
    )

    def __init__(self, link: DrafterLink, drafter: RequestDrafter, prefix: Prefix) -> None:
        self.link = link
        self.asked_at = 0.0
        self.answer_seconds = 0.0
        """From the last question to its answer; 0 where that was there already."""
        self.is_lost = False
        self._drafter = drafter
        self._prefix = prefix
        self._box: ProposalCollector | None = None
        self._round_index = -1
        self._base_length = 0
        self._known_length = -1
        self._question = (0, 0)
        self._reopened = False
        self._has_answered = False
        self._ahead: Proposal | None = None
        """The path drafted after the last question's base, which the replica told unasked."""
        self.session_id = link.attach(self)

    def ask(self, box: ProposalCollector, num_tokens: int, width: int, deadline_ms: int) -> None:
        """Ask the replica for proposals; the session is opened with its first question. Raises PeerLost."""
        self.asked_at = asyncio.get_running_loop().time()
        proposal = self._told_ahead(num_tokens) if width == 1 else None
        self._ahead = None
        self._round_index += 1
        self._base_length = len(self._prefix)
        self._question = (num_tokens, width)
        self._reopened = False
        if proposal is not None:
            self._box = None
            self.answer_seconds = 0.0
            self._send(deadline_ms, is_answered=True)
            box.cast(self._drafter, (proposal,))
            return
        self.link.asked(self.asked_at)
        self._box = box
        self._send(deadline_ms)

    def _told_ahead(self, num_tokens: int) -> Proposal | None:
        """The proposal that the replica would answer now, where it has told it already."""
        path = self._ahead
        if path is None:
            return None
        begin = len(self._prefix) - self._base_length
        end = begin + num_tokens
        if len(path.token_ids) < end or list(path.token_ids[:begin]) != self._prefix.since(self._base_length):
            return None
        return path.part(begin, end)

    def open(self) -> None:
        """Tell the replica the prefix, unless it knows one. Raises PeerLost, also when no message holds the prefix."""
        prefix = self._prefix
        if self._known_length < 0:
            opening = pb.DraftCommand(session_id=self.session_id)
            opening.open.request_id = prefix.request_id
            opening.open.prompt_token_ids.extend(prefix.prompt_token_ids)
            opening.open.output_token_ids.extend(prefix.output_token_ids)
            opening.open.sampling.CopyFrom(convert.sampling_to_pb(prefix.params))
            try:
                self.link.send(opening)
            except BodyTooLarge as error:
                # The request goes on without this drafter.
                self.link.detach(self.session_id)
                raise PeerLost(str(error)) from error
            self._known_length = len(prefix)

    def _send(self, deadline_ms: int, is_answered: bool = False) -> None:
        self.open()
        prefix = self._prefix
        rows = prefix.candidates_since(self._known_length)
        self.link.send(
            pb.DraftCommand(
                session_id=self.session_id,
                propose=pb.Propose(
                    round_index=self._round_index,
                    base_length=self._base_length,
                    committed_token_ids=prefix.since(self._known_length),
                    num_speculative_tokens=self._question[0],
                    width=self._question[1],
                    top_candidates=_top_candidates(rows),
                    deadline_ms=deadline_ms,
                    takes_ahead=True,
                    is_answered=is_answered,
                ),
            ),
            prefix.heard_at,
        )
        self._known_length = self._base_length

    def on_missed(self) -> None:
        # The first answer waits for the whole prompt to be read: late is no fault there, silence to all is.
        if self._has_answered or self.link.is_quiet():
            self.link.failure("missed", self.asked_at)

    def on_proposed(self, message: pb.Proposed) -> None:
        link, box = self.link, self._box
        self._has_answered = True
        if message.round_index != self._round_index or message.base_length != self._base_length:
            link.drop("stale")
            return
        if box is None:
            link.drop("duplicate")
            return
        self._box = None
        if box.closed:
            link.drop("late")
            return
        self._prefix.heard_at = link.read_at
        self.answer_seconds = asyncio.get_running_loop().time() - self.asked_at
        name = link.drafter_id
        box.cast(self._drafter, tuple([convert.proposal_from_pb(proposal, name) for proposal in message.proposals]))

    def on_ahead(self, message: pb.Ahead) -> None:
        """Keep what the replica has drafted ahead since its answer: having it costs no time."""
        link = self.link
        if message.round_index != self._round_index or message.base_length != self._base_length:
            link.drop("stale")
        elif len(message.path.token_ids) > MAX_AHEAD * self._question[0]:
            link.drop("malformed")
            link.failure("malformed", self.asked_at)
        else:
            self._ahead = convert.proposal_from_pb(message.path, link.drafter_id)

    def on_unknown(self) -> None:
        """Open the session again that the replica has forgotten, once for each question."""
        link, box = self.link, self._box
        self._prefix.heard_at = link.read_at
        forgotten, self.session_id = self.session_id, link.attach(self)
        link.detach(forgotten)
        self._known_length = -1
        self._ahead = None
        if box is None or box.closed:
            return
        if self._reopened:
            link.drop("unknown_session")
            link.failure("unknown_session", self.asked_at)
            box.withdraw(self._drafter)
            return
        self._reopened = True
        try:
            self._send(0)
        except PeerLost:
            self.on_lost("lost")

    def on_lost(self, reason: str) -> None:
        """Give up the answer: the replica is gone or ejected, and the round goes on without it."""
        self.is_lost = True
        box, self._box = self._box, None
        if box is not None and not box.closed:
            self.link.drop(reason)
            box.withdraw(self._drafter)

    def end(self, *, aborted: bool) -> None:
        if not self.is_lost:
            self.link.detach(self.session_id)
            if self._known_length >= 0:
                self.link.say_end(self.session_id, aborted=aborted)


def _top_candidates(rows: list[tuple[int, ...]]) -> token_pb2.TopCandidates | None:
    """Rows of top candidates cut to one width, the narrowest, as a message needs."""
    if not rows:
        return None
    width = min(map(len, rows))
    return convert.top_candidates_to_pb([row[:width] for row in rows])


class DrafterLink(PeerLink[pb.DraftCommand]):
    """One replica. `fingerprint()` is the target's tokenizer fingerprint, against which the replica's is compared."""

    role = "drafter"

    def __init__(
        self,
        drafter_id: str,
        address: str,
        policy: LinkPolicy,
        failures: EjectionPolicy,
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
        self._failures = OutlierEjection(failures)
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
        """Whether the replica has answered no request for longer than reading a long prompt may take."""
        now = asyncio.get_running_loop().time()
        return self._quiet_since is not None and now - self._quiet_since > self._failures.policy.warm_up_s

    def answered(self) -> None:
        self._failures.answered()

    def failure(self, reason: str, asked_at: float) -> None:
        """Count a failure. `reason`: "missed", or why an answer was malformed. The third failure ejects this replica
        for a while."""
        now = asyncio.get_running_loop().time()
        judge = self._failures.missed if reason == "missed" else self._failures.malformed
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
                self.failure("malformed", session.asked_at)

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
