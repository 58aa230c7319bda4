"""All verifiers of the served model: which are there, which may serve, and the choice of one for a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from moot.core.errors import NoCapacity, PeerRefused
from moot.core.types import ModelInfo
from moot.metrics import Metrics
from services.router.links import LinkPolicy
from services.router.ports import Prefix
from services.router.settings import Places
from services.router.target_policy import TargetPolicy
from services.router.targets import MovingTarget, numerics_of
from services.router.verifier_facts import InsideFacts, VerifierFacts
from services.router.verifiers import VerifierLink


class VerifierPool:
    """All verifiers of the served model. `fingerprint`: of the router's tokenizer, which theirs must equal."""

    def __init__(
        self,
        policy: LinkPolicy,
        target_policy: TargetPolicy,
        fingerprint: str,
        metrics: Metrics,
        on_state: Callable[[], None] = lambda: None,
        on_inside: Callable[[InsideFacts], None] = lambda _: None,
    ) -> None:
        """`on_inside` is told each drafter inside a verifier that was admitted."""
        self.links: dict[str, VerifierLink] = {}
        self.policy = target_policy
        self.metrics = metrics
        self.info: ModelInfo | None = None
        """Of the first verifier that was admitted; every later one must show the same model, and as long a context:
        a request is cut to this limit when it is planned, so no text depends on which of them serves it."""
        self._link_policy = policy
        self._fingerprint = fingerprint
        self._told = on_state
        self._on_inside = on_inside
        self.num_without_room = 0
        """New requests that every verifier has refused a moment ago, and that wait to be taken."""
        self._waiters: set[asyncio.Future[None]] = set()
        self._leaving: dict[VerifierLink, asyncio.Task[None]] = {}

    @property
    def all_links(self) -> list[VerifierLink]:
        """Those that serve, and those whose address is gone and whose sessions are still moving."""
        return [*self.links.values(), *self._leaving]

    @property
    def is_available(self) -> bool:
        return any(link.is_ready for link in self.links.values())

    @property
    def places(self) -> Places | None:
        """Of those that can be asked; None while one of them has not said, or there is none."""
        facts = [link.facts for link in self.links.values() if link.is_ready and link.facts is not None]
        if not facts or not all(one.max_waiting_seqs for one in facts):
            return None
        return Places(sum(one.max_num_seqs for one in facts), sum(one.max_waiting_seqs for one in facts))

    def are_all_in(self, links: set[VerifierLink]) -> bool:
        """Whether there is no verifier to be asked but these."""
        return all(link in links for link in self.links.values() if link.is_ready)

    @property
    def drafts(self) -> bool:
        """Whether a verifier that can be asked has drafters inside."""
        return any(link.is_ready and link.facts is not None and link.facts.drafters for link in self.links.values())

    @property
    def fingerprint(self) -> str:
        """Of the target's tokenizer; empty until a verifier was admitted."""
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
        """A verifier whose address is gone takes nothing new; what it serves moves at its next round, as in a drain."""
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

        `avoid`: those that had no capacity a moment ago; empty again when nobody else is left. Raises NoCapacity.
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
        """Until some link changes its state, at most `timeout_s`."""
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
            self._on_inside(drafter)


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
