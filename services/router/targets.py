"""The target of a request, wherever it runs: moving to another verifier, probation, bounded waits."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from moot.core.errors import (
    Draining,
    MootError,
    NoCapacity,
    OutOfMemory,
    PeerError,
    PeerLost,
    RequestPoisoned,
    UnknownSession,
)
from moot.core.types import Draft, Verification
from services.router.ports import Prefix
from services.router.verifiers import VerifierLink
from services.router.verify_sessions import VerifySession

if TYPE_CHECKING:
    from services.router.verifier_pool import VerifierPool

_log = logging.getLogger("moot.router.verifiers")


class MovingTarget:
    """The `Target` port of one request.

    A move opens prompt + committed output on another verifier, which answers with the next token: the same one that
    the lost verifier would have sent. A request that waited for an answer when its verifier died is on probation: it
    shares the next verifier's losses with no other such request, so that the one that kills is told from its
    neighbours. The second verifier that it kills convicts it.
    """

    def __init__(self, pool: VerifierPool, prefix: Prefix, num_top_candidates: int) -> None:
        self._pool = pool
        self._prefix = prefix
        self._num_top_candidates = num_top_candidates
        self._session: VerifySession | None = None
        self._numerics = ""
        self._num_moves = 0
        self._num_kills = 0
        self._num_shortages = 0
        self._is_without_room = False
        self._probation: asyncio.Lock | None = None

    async def open(self) -> Verification:
        return await self._place(set())

    async def room(self) -> None:
        session = self._session
        if session is not None and session.is_alive:
            await session.link.pool.reserve(session.session_id, self._pool.policy.verify_timeout_s)

    @property
    def verifier_id(self) -> str:
        return "" if self._session is None else self._session.link.address

    async def verify(self, draft: Draft) -> tuple[Verification, bool]:
        await self.room()
        session = self._session
        short: set[VerifierLink] = set()
        if session is None:
            raise UnknownSession("verified before it was opened")
        if not session.is_alive:
            self._leave(session.link.loss("lost between two rounds"), was_computing=False)
        elif not session.link.is_ready and self._pool.is_available:
            # One that goes away finishes what it has, as long as nobody else can take it.
            self._leave(Draining("the verifier goes away"), was_computing=False)
        else:
            try:
                session.verify(draft, len(self._prefix), self._pool.policy.verify_timeout_s)
                verification = await session.answer()
            except (PeerError, UnknownSession, NoCapacity) as error:
                self._leave(error, was_computing=True)
                if isinstance(error, OutOfMemory):
                    self._note_shortage(error)
                    short.add(session.link)
            else:
                self._acquit()
                return verification, False
        return await self._place(short), True

    def end(self, *, aborted: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.link.end(session, aborted=aborted)
        self._release()

    async def _place(self, full: set[VerifierLink]) -> Verification:
        """Open on some verifier; again on another one while they are lost, within the bounds. `full`: those that had no
        room for this request a moment ago."""
        try:
            return await self._placed(full)
        finally:
            self._note_room(True)

    async def _placed(self, full: set[VerifierLink]) -> Verification:
        pool, policy = self._pool, self._pool.policy
        loop = asyncio.get_running_loop()
        deadline = loop.time() + policy.no_verifier_wait_s
        while True:
            link = await pool.choose(self._numerics, full, deadline)
            if self._num_kills and not await self._on_probation(link):
                continue
            try:
                self._session = link.open(self._prefix, self._num_top_candidates)
                verification = await self._session.answer()
            except NoCapacity as error:
                if isinstance(error, OutOfMemory):
                    self._note_shortage(error)
                if not isinstance(error, Draining):
                    full.add(link)
                    self._note_room(isinstance(error, OutOfMemory) or not pool.are_all_in(full))
                self._session = None
                self._release()
            except PeerError as error:
                self._leave(error, was_computing=self._session is not None)
                deadline = loop.time() + policy.no_verifier_wait_s
            else:
                if self._numerics and self._numerics != numerics_of(link):
                    pool.metrics.request_moves.labels("other_numerics").inc()
                self._numerics = numerics_of(link)
                return verification

    def _leave(self, error: MootError, was_computing: bool) -> None:
        """Give the present session up and count the move. Raises when this request may not move once more."""
        session, self._session = self._session, None
        if session is not None:
            session.link.end(session, aborted=True)
        self._release()
        policy = self._pool.policy
        reason = _REASONS.get(type(error), "lost")
        self._pool.metrics.request_moves.labels(reason).inc()
        if reason not in ("lost", "internal"):
            return
        self._num_moves += 1
        # Several verifiers may freeze together: one that was ailing before the request's turn is not held against it.
        self._num_kills += was_computing and not (session is not None and session.is_blameless)
        if self._num_kills >= policy.max_kills:
            _log.error("request quarantined", extra={"request": self._prefix.request_id, "kills": self._num_kills})
            raise RequestPoisoned("this request was there each time a verifier failed, and is not tried again")
        if self._num_moves > policy.max_moves:
            raise NoCapacity(f"lost {self._num_moves} verifiers in a row", retry_after_s=policy.retry_after_s)

    async def _on_probation(self, link: VerifierLink) -> bool:
        """Wait until no other suspect is being tried on `link`. False: it is not ready any more."""
        if self._probation is None:
            try:
                async with asyncio.timeout(self._pool.policy.probation_wait_s):
                    await link.probation.acquire()
                    self._probation = link.probation
            except TimeoutError:
                return link.is_ready
        if not link.is_ready:
            self._release()
        return link.is_ready

    def _note_room(self, has_room: bool) -> None:
        """A request that has begun moves on a promise made before; only new ones tell that there is no room."""
        is_without_room = not has_room and not self._prefix.output_token_ids
        self._pool.num_without_room += is_without_room - self._is_without_room
        self._is_without_room = is_without_room

    def _note_shortage(self, error: OutOfMemory) -> None:
        """Raises it once this request has found no memory too often. It is no verifier's fault."""
        self._num_shortages += 1
        if self._num_shortages >= self._pool.policy.max_shortages:
            raise error

    def _acquit(self) -> None:
        self._num_kills = self._num_shortages = 0
        self._release()

    def _release(self) -> None:
        lock, self._probation = self._probation, None
        if lock is not None:
            lock.release()


_REASONS: dict[type[MootError], str] = {
    PeerLost: "lost",
    PeerError: "internal",
    UnknownSession: "unknown_session",
    NoCapacity: "no_capacity",
    OutOfMemory: "no_capacity",
    Draining: "draining",
}


def numerics_of(link: VerifierLink) -> str:
    return link.facts.numerics_fingerprint if link.facts else ""
