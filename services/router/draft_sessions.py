"""One request on one drafter replica: what it was told, what it was asked, and which answer fits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from moot.core.errors import BodyTooLarge, PeerLost
from moot.core.types import Proposal
from moot.rpc import convert
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import token_pb2
from services.router.ports import BallotBox, Drafter, Prefix

if TYPE_CHECKING:
    from services.router.drafters import DrafterLink


MAX_AHEAD = 3
"""Times K that a drafter may tell ahead: its proposal, the target's token and the next proposal."""


class DraftSession:
    """One request on one replica. `Drafter` of ports.py is the pool's part in front of it."""

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

    def __init__(self, link: DrafterLink, drafter: Drafter, prefix: Prefix) -> None:
        self.link = link
        self.asked_at = 0.0
        self.answer_seconds = 0.0
        """From the last question to its answer; 0 where that was there already."""
        self.is_lost = False
        self._drafter = drafter
        self._prefix = prefix
        self._box: BallotBox | None = None
        self._round_index = -1
        self._base_length = 0
        self._known_length = -1
        self._question = (0, 0)
        self._reopened = False
        self._has_answered = False
        self._ahead: Proposal | None = None
        """What was drafted after the last question's base, told unasked."""
        self.session_id = link.attach(self)

    def ask(self, box: BallotBox, num_tokens: int, width: int, deadline_ms: int) -> None:
        """Raises PeerLost. The session is opened with its first question."""
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
        return Proposal(path.drafter_id, path.token_ids[begin:end], path.confidences[begin:end])

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
            self.link.strike("missed", self.asked_at)

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
        """What the replica has drafted since its answer. It costs nobody anything to have it."""
        link = self.link
        if message.round_index != self._round_index or message.base_length != self._base_length:
            link.drop("stale")
        elif len(message.path.token_ids) > MAX_AHEAD * self._question[0]:
            link.drop("malformed")
            link.strike("malformed", self.asked_at)
        else:
            self._ahead = convert.proposal_from_pb(message.path, link.drafter_id)

    def on_unknown(self) -> None:
        """The replica has forgotten the session: open it again, once for each question."""
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
            link.strike("unknown_session", self.asked_at)
            box.withdraw(self._drafter)
            return
        self._reopened = True
        try:
            self._send(0)
        except PeerLost:
            self.on_lost("lost")

    def on_lost(self, reason: str) -> None:
        """The replica is gone or ejected; the round goes on without its answer."""
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
    """Rows of one message have one width: the narrowest."""
    if not rows:
        return None
    width = min(map(len, rows))
    return convert.top_candidates_to_pb([row[:width] for row in rows])
