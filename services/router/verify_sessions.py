"""One request on one verifier: which answer it waits for, and until when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from moot.core.errors import UnknownSession
from moot.core.types import Draft, Verification
from moot.rpc import convert
from moot.v1 import verifier_service_pb2 as pb
from services.router.ports import Prefix

if TYPE_CHECKING:
    from services.router.verifiers import VerifierLink


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
        """Whether the verifier still has it, as far as is known."""
        return self.link.holds(self)

    def verify(self, draft: Draft, base_length: int, timeout_s: float) -> None:
        """Send a draft; its place in the pool must be reserved. Raises PeerLost."""
        round_index = self._round_index + 1
        self.link.pool.enter(self.session_id)
        inside = self._prefix.inside
        command = convert.draft_to_pb(draft, round_index, base_length, inside.num_tokens if inside else 0)
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
