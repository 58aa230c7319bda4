"""The target of a request, wherever it runs: moving to another verifier, suspects, bounded waits.

`VerifierPool` holds all verifiers of the served model: which are there, which may serve, and the choice of one for a
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from moot.core.errors import (
    MOVING,
    Draining,
    MootError,
    NoCapacity,
    OutOfMemory,
    PeerError,
    PeerRefused,
    RequestPoisoned,
    UnknownSession,
    row_of,
)
from moot.core.types import Draft, ModelInfo, Verification
from moot.runtime.metrics import Metrics
from services.router.generation.ports import Prefix
from services.router.generation.request_types import Places
from services.router.peers.links import LinkPolicy
from services.router.peers.verifier_link import AttachedFacts, TargetPolicy, VerifierFacts, VerifierLink, VerifySession

_log = logging.getLogger("moot.router.verifiers")


class MovingTarget:
    """The `Target` port of one request.

    A move opens prompt + committed output on another verifier, which answers with the next token: the same one that the
    lost verifier would have sent. A request that waited for an answer when its verifier died is suspect: it shares the
    next verifier's losses with no other such request, so that the request that makes verifiers fail is told from its
    neighbours. After `max_losses` lost verifiers (two by default) it is not tried again.
    """

    def __init__(self, pool: VerifierPool, prefix: Prefix, num_top_candidates: int) -> None:
        self._pool = pool
        self._prefix = prefix
        self._num_top_candidates = num_top_candidates
        self._session: VerifySession | None = None
        self._numerics = ""
        self._num_moves = 0
        self._num_losses = 0
        self._num_shortages = 0
        self._is_without_room = False
        self._suspect_waits: asyncio.Lock | None = None

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
            except MOVING as error:
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
        """Open on some verifier; again on another one while verifiers are lost, within the bounds. `full`: those that
        had no room for this request a moment ago."""
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
            if self._num_losses and not await self._suspects(link):
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
        reason = row_of(type(error)).moves
        self._pool.metrics.request_moves.labels(reason).inc()
        if reason not in ("lost", "internal"):
            return
        self._num_moves += 1
        # Several verifiers may freeze together: one that was ailing before the request's turn is not held against it.
        self._num_losses += was_computing and not (session is not None and session.is_blameless)
        if self._num_losses >= policy.max_losses:
            _log.error("request quarantined", extra={"request": self._prefix.request_id, "losses": self._num_losses})
            raise RequestPoisoned("this request was there each time a verifier failed, and is not tried again")
        if self._num_moves > policy.max_moves:
            raise NoCapacity(f"lost {self._num_moves} verifiers in a row", retry_after_s=policy.retry_after_s)

    async def _suspects(self, link: VerifierLink) -> bool:
        """Wait until no other suspect is being tried on `link`. False: it is not ready any more."""
        if self._suspect_waits is None:
            try:
                async with asyncio.timeout(self._pool.policy.suspect_wait_s):
                    await link.suspect.acquire()
                    self._suspect_waits = link.suspect
            except TimeoutError:
                return link.is_ready
        if not link.is_ready:
            self._release()
        return link.is_ready

    def _note_room(self, has_room: bool) -> None:
        """Note whether there is room for this request. One that has begun moves on a promise made before; only new ones
        tell that there is no room."""
        is_without_room = not has_room and not self._prefix.output_token_ids
        self._pool.num_without_room += is_without_room - self._is_without_room
        self._is_without_room = is_without_room

    def _note_shortage(self, error: OutOfMemory) -> None:
        """Count a lack of memory, which is no verifier's fault; raises `error` once this request has met it too
        often."""
        self._num_shortages += 1
        if self._num_shortages >= self._pool.policy.max_shortages:
            raise error

    def _acquit(self) -> None:
        self._num_losses = self._num_shortages = 0
        self._release()

    def _release(self) -> None:
        lock, self._suspect_waits = self._suspect_waits, None
        if lock is not None:
            lock.release()


def numerics_of(link: VerifierLink) -> str:
    return link.facts.numerics_fingerprint if link.facts else ""


class VerifierPool:
    """All verifiers of the served model. `fingerprint`: of the router's tokenizer, which theirs must equal."""

    def __init__(
        self,
        policy: LinkPolicy,
        target_policy: TargetPolicy,
        fingerprint: str,
        metrics: Metrics,
        on_state: Callable[[], None] = lambda: None,
        on_attached: Callable[[AttachedFacts], None] = lambda _: None,
    ) -> None:
        """`on_attached` is told each drafter attached to a verifier that was admitted."""
        self.links: dict[str, VerifierLink] = {}
        self.policy = target_policy
        self.metrics = metrics
        self.info: ModelInfo | None = None
        """Of the first verifier that was admitted; every later one must show the same model, and as long a context:
        a request is cut to this limit when it is planned, so no text depends on which of them serves it."""
        self._link_policy = policy
        self._fingerprint = fingerprint
        self._told = on_state
        self._on_attached = on_attached
        self.num_without_room = 0
        """New requests that every verifier has refused a moment ago, and that wait to be taken."""
        self._waiters: set[asyncio.Future[None]] = set()
        self._leaving: dict[VerifierLink, asyncio.Task[None]] = {}

    @property
    def all_links(self) -> list[VerifierLink]:
        """Links to verifiers that serve, and to those whose address is gone and whose sessions are still moving."""
        return [*self.links.values(), *self._leaving]

    @property
    def is_available(self) -> bool:
        return any(link.is_ready for link in self.links.values())

    @property
    def places(self) -> Places | None:
        """Places of the verifiers that can be asked; None while one of them has not said, or there is none."""
        facts = [link.facts for link in self.links.values() if link.is_ready and link.facts is not None]
        if not facts or not all(one.max_waiting_seqs for one in facts):
            return None
        return Places(sum(one.max_num_seqs for one in facts), sum(one.max_waiting_seqs for one in facts))

    def are_all_in(self, links: set[VerifierLink]) -> bool:
        """Whether there is no verifier to be asked but these."""
        return all(link in links for link in self.links.values() if link.is_ready)

    @property
    def drafts(self) -> bool:
        """Whether a verifier that can be asked has attached drafters."""
        return any(link.is_ready and link.facts is not None and link.facts.drafters for link in self.links.values())

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the target's tokenizer; empty until a verifier was admitted."""
        return self.info.tokenizer_fingerprint if self.info else ""

    @property
    def max_draft_tokens(self) -> int:
        return min((link.facts.max_draft_tokens for link in self.links.values() if link.facts), default=0)

    @property
    def context_limit(self) -> int:
        return self.info.context_limit if self.info else 0

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size if self.info else 0

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.info.end_token_ids if self.info else frozenset()

    def target(self, prefix: Prefix, num_top_candidates: int) -> MovingTarget:
        return MovingTarget(self, prefix, num_top_candidates)

    async def set_addresses(self, addresses: Iterable[str]) -> None:
        """Follow the list of addresses. A verifier whose address is gone takes nothing new; what it serves moves at its
        next round, as in a drain."""
        wanted = set(addresses)
        gone = [self.links.pop(address) for address in set(self.links) - wanted]
        for link in gone:
            task = self._leaving[link] = asyncio.create_task(link.retire(), name=f"retire {link.address}")
            task.add_done_callback(partial(self._left, link))
        for address in sorted(wanted - set(self.links)):
            link = self.links[address] = VerifierLink(
                address, self._link_policy, self.policy, self._admit, self.metrics, self._on_state
            )
            link.start()

    async def close(self) -> None:
        """End all streams and everything that waits on them."""
        links, self.links = self.all_links, {}
        await asyncio.gather(*(link.stop() for link in links))
        await asyncio.gather(*self._leaving.values())

    def _left(self, link: VerifierLink, retiring: asyncio.Task[None]) -> None:
        del self._leaving[link]
        self._on_state()

    async def choose(self, numerics: str, avoid: set[VerifierLink], deadline: float) -> VerifierLink:
        """The next verifier, the least loaded, with these numerics if there is one; waits until `deadline` (loop time).

        `avoid`: those that had no capacity a moment ago; empty again when no other is left. Raises NoCapacity.
        """
        loop = asyncio.get_running_loop()
        while True:
            ready = [link for link in self.links.values() if link.is_ready and link not in avoid]
            if ready:
                chosen = min(ready, key=lambda link: (numerics_of(link) != numerics, link.is_in_doubt, link.rank))
                chosen.take_turn()
                return chosen
            now = loop.time()
            if now >= deadline:
                problem = "has room" if avoid else "can be reached"
                raise NoCapacity(f"no verifier {problem}", self.policy.retry_after_s, "verifiers")
            pause = min(deadline - now, self.policy.capacity_retry_s) if avoid else deadline - now
            await self._changed(pause)
            avoid.clear()

    async def _changed(self, timeout_s: float) -> None:
        """Wait until some link changes its state, at most `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def _on_state(self) -> None:
        for waiter in self._waiters:
            _wake(waiter)
        self._told()

    def _admit(self, address: str, facts: VerifierFacts) -> None:
        info = facts.info
        if info.tokenizer_fingerprint != self._fingerprint:
            raise PeerRefused(
                f"verifier at {address} has tokenizer {info.tokenizer_fingerprint}, the router {self._fingerprint}"
            )
        known = self.info
        if known is None:
            known = self.info = info
        for fact, shown in _SAME.items():
            theirs, ours = getattr(info, fact), getattr(known, fact)
            if theirs != ours:
                raise PeerRefused(f"verifier at {address} has {shown} {_words(theirs)}, the others {_words(ours)}")
        if info.context_limit < known.context_limit:
            raise PeerRefused(
                f"verifier at {address} has a context of {info.context_limit} tokens, "
                f"less than the {known.context_limit} that requests here may have"
            )
        for drafter in facts.drafters:
            self._on_attached(drafter)


_SAME = {
    "model": "the model",
    "revision": "the revision",
    "vocab_size": "a vocabulary size of",
    "end_token_ids": "the end tokens",
}
"""What must be equal of all verifiers, in the words of a refusal."""


def _words(value: object) -> str:
    return str(sorted(value)) if isinstance(value, frozenset) else str(value)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
