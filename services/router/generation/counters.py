"""The counters of speculation, moved by exactly what a request's own counts gained: their sums stay equal.

`PlainTimes` estimates what plain decoding would have taken for a round's tokens, so that gain and loss can be seen.
Pure.
"""

from __future__ import annotations

from prometheus_client import Counter

from moot.core.generation import Generation
from moot.core.types import Draft, Verification
from moot.runtime.metrics import Metrics

_FOLLOWING = 0.05
"""How fast the usual duration of a plain step follows the last one."""


class PlainTimes:
    """Times of plain steps that were seen, by how many requests were in them (in powers of two).

    Without drafting, each token of a round would have taken a round of its own: without the draft stage, and with a
    step of one token for each request. Such steps happen in passing (the last token of a text, K = 0) and are measured
    then; a number of requests that never had one is taken to need as long as with its drafts, so that the estimate errs
    towards speculation and a loss that it shows is one.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def estimate(self, verification: Verification, num_tokens: int, verify_seconds: float) -> float:
        """Seconds for `num_tokens`, of a round that waited `verify_seconds` for its verification."""
        forward = verification.forward_us * 1e-6
        requests = verification.batch_requests
        if requests < 1 or forward <= 0:
            return num_tokens * verify_seconds
        size = (requests - 1).bit_length()
        ratio = 1.0
        if verification.batch_prefill_tokens == 0:
            usual = self._seconds.get(size)
            if verification.batch_tokens == requests:
                self._seconds[size] = forward if usual is None else usual + _FOLLOWING * (forward - usual)
            elif usual is not None:
                ratio = min(usual / forward, 1.0)
        # A request that waits for a step waits for the drafts of others.
        in_steps = min(forward + verification.queue_us * 1e-6, verify_seconds)
        return num_tokens * (verify_seconds - in_steps * (1.0 - ratio))


class RoundCounters:
    """The counters of one router. Children of labelled counters are kept: looking one up costs more than moving it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._positions: list[Counter] = []
        self._drafters: dict[str, tuple[Counter, Counter, Counter]] = {}
        self._draft_seconds = metrics.round_duration_seconds.labels("draft")
        self._verify_seconds = metrics.round_duration_seconds.labels("verify")
        self._plain = PlainTimes()

    def count(self, draft: Draft, verification: Verification, generation: Generation, known: Known) -> None:
        """Count one round, as it was committed. `known`: what was counted of this request's drafters before; it is
        brought up to date."""
        metrics = self._metrics
        metrics.rounds.inc()
        if draft.token_ids:
            metrics.draft_tokens.inc(len(draft))
        if verification.num_accepted:
            metrics.accepted_tokens.inc(verification.num_accepted)
        for depth in range(verification.num_accepted):
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
        """Count how long the round's stages took for `num_tokens` committed tokens."""
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
