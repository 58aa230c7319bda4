"""The counters of speculation, moved by exactly what a request's own counts gained: their sums stay equal."""

from __future__ import annotations

from prometheus_client import Counter

from moot.core.generation import Advance, Generation
from moot.core.types import Draft, Verification
from moot.metrics import Metrics
from services.router.gains import PlainTimes


class RoundCounters:
    """One for a router. Children of labelled counters are kept: looking one up costs more than moving it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._positions: list[Counter] = []
        self._drafters: dict[str, tuple[Counter, Counter, Counter]] = {}
        self._draft_seconds = metrics.round_duration_seconds.labels("draft")
        self._verify_seconds = metrics.round_duration_seconds.labels("verify")
        self._plain = PlainTimes()

    def count(self, draft: Draft, advance: Advance, generation: Generation, known: Known) -> None:
        """One round. `known`: what was counted of this request's drafters before; it is brought up to date."""
        metrics = self._metrics
        metrics.rounds.inc()
        if draft.token_ids:
            metrics.draft_tokens.inc(len(draft))
        if advance.num_accepted:
            metrics.accepted_tokens.inc(advance.num_accepted)
        for depth in range(advance.num_accepted):
            self._position(depth).inc()
        for drafter_id, count in generation.drafters.items():
            now = (count.num_proposed_tokens, count.num_accepted_tokens, count.num_votes_won)
            before = known.get(drafter_id, (0, 0, 0))
            if now != before:
                for counter, new, old in zip(self._drafter(drafter_id), now, before, strict=True):
                    if new != old:
                        counter.inc(new - old)
                known[drafter_id] = now

    def time(self, verification: Verification, num_tokens: int, draft_seconds: float, verify_seconds: float) -> None:
        """How long the round's stages took for `num_tokens` committed ones."""
        self._draft_seconds.observe(draft_seconds)
        self._verify_seconds.observe(verify_seconds)
        self._metrics.plain_decoding_seconds.inc(self._plain.estimate(verification, num_tokens, verify_seconds))

    def _position(self, depth: int) -> Counter:
        while depth >= len(self._positions):
            self._positions.append(self._metrics.accepted_tokens_per_position.labels(str(len(self._positions))))
        return self._positions[depth]

    def _drafter(self, drafter_id: str) -> tuple[Counter, Counter, Counter]:
        counters = self._drafters.get(drafter_id)
        if counters is None:
            metrics = self._metrics
            counters = self._drafters[drafter_id] = (
                metrics.proposal_tokens.labels(drafter_id),
                metrics.proposals_accepted_tokens.labels(drafter_id),
                metrics.votes_won.labels(drafter_id),
            )
        return counters


Known = dict[str, tuple[int, int, int]]
"""Per drafter: proposed and accepted tokens, votes won."""
