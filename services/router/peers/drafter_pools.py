"""Pools of drafters: alike replicas behind one id, one of them for each request until it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from moot.core.errors import PeerLost
from moot.runtime.metrics import Metrics
from services.router.generation.ports import Prefix, ProposalCollector
from services.router.peers.drafter_link import DrafterLink, DraftSession
from services.router.peers.links import LinkPolicy
from services.router.peers.outlier_ejection import EjectionPolicy

_FOLLOWING = 0.1
"""How fast what answers usually take follows the last one."""


class PooledDrafter:
    """A pool of drafters as the `RequestDrafter` port of one request: its session on one replica, kept until that is
    lost."""

    __slots__ = ("_pool", "_prefix", "_session")

    def __init__(self, pool: DrafterPool, prefix: Prefix) -> None:
        self._pool = pool
        self._prefix = prefix
        self._session: DraftSession | None = None

    @property
    def drafter_id(self) -> str:
        return self._pool.drafter_id

    def prepare(self) -> None:
        session = self._on_replica()
        if session is not None and len(self._prefix) < session.link.context_limit:
            try:
                session.open()
            except PeerLost:
                self._session = None

    def ask(self, box: ProposalCollector, num_speculative_tokens: int, width: int) -> bool:
        session = self._on_replica()
        if session is None:
            return False
        # Past its context a drafter has nothing to say; the others go on.
        num_tokens = min(num_speculative_tokens, session.link.context_limit - len(self._prefix))
        if num_tokens < 1:
            return False
        box.expect(self)
        try:
            session.ask(box, num_tokens, width, self._pool.deadline_ms)
        except PeerLost:
            box.withdraw(self)
            return False
        return True

    @property
    def answer_seconds(self) -> float | None:
        return self._pool.answer_seconds

    def missed(self) -> None:
        if self._session is not None:
            self._session.on_missed()

    def answered(self) -> None:
        if self._session is not None:
            self._session.link.answered()
            self._pool.note_answer(self._session.answer_seconds)

    def malformed(self, reason: str) -> None:
        self._pool.metrics.proposals_dropped.labels(self.drafter_id, reason).inc()
        if self._session is not None:
            self._session.link.failure(reason, self._session.asked_at)

    def _on_replica(self) -> DraftSession | None:
        """The session, on another replica where the last one was lost; None without any."""
        session = self._session
        if session is not None and (session.is_lost or not session.link.is_ready):
            session.end(aborted=True)
            session = self._session = None
        if session is None and (link := self._pool.choose()) is not None:
            session = self._session = DraftSession(link, self, self._prefix)
        return session

    def end(self, *, aborted: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end(aborted=aborted)


class DrafterPool:
    """One drafter: alike replicas behind one id. Addresses may change at any time."""

    def __init__(
        self,
        drafter_id: str,
        policy: LinkPolicy,
        failures: EjectionPolicy,
        fingerprint: Callable[[], str],
        metrics: Metrics,
        on_state: Callable[[], None],
        on_described: Callable[[str, str], None],
        deadline_ms: int,
    ) -> None:
        """`fingerprint`, `on_described`: see DrafterLink. `deadline_ms`: told to the replicas with every question."""
        self.drafter_id = drafter_id
        self.deadline_ms = deadline_ms
        self.metrics = metrics
        metrics.drafter_ejections.labels(drafter_id)
        self._make: Callable[[str], DrafterLink] = lambda address: DrafterLink(
            drafter_id, address, policy, failures, fingerprint, metrics, on_state, on_described
        )
        self.links: dict[str, DrafterLink] = {}
        self._on_state = on_state
        self.answer_seconds: float | None = None

    def note_answer(self, seconds: float) -> None:
        """Note one more answer that came in time, so long after its question."""
        usual = self.answer_seconds
        self.answer_seconds = seconds if usual is None else usual + _FOLLOWING * (seconds - usual)

    @property
    def wants_top_candidates(self) -> bool:
        return any(link.kind == "recycling" for link in self.links.values())

    @property
    def is_available(self) -> bool:
        return any(link.is_ready for link in self.links.values())

    def serves(self, prefix: Prefix) -> bool:
        return True

    def drafter(self, prefix: Prefix) -> PooledDrafter:
        return PooledDrafter(self, prefix)

    def choose(self) -> DrafterLink | None:
        """The least loaded replica that can be asked, in turn."""
        chosen = min((link for link in self.links.values() if link.is_ready), key=lambda link: link.rank, default=None)
        if chosen is not None:
            chosen.take_turn()
        return chosen

    async def set_addresses(self, addresses: Iterable[str]) -> None:
        wanted = set(addresses)
        gone = [self.links.pop(address) for address in set(self.links) - wanted]
        for address in sorted(wanted - set(self.links)):
            link = self.links[address] = self._make(address)
            link.start()
        await asyncio.gather(*(link.stop() for link in gone))
        if gone:
            self._on_state()
