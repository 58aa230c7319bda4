"""The speculation length K: how many tokens to ask the drafters for. Durations, in seconds, are arguments; there is no
clock.

`fixed`; `minions` (2402.15678): climb to the least verify time per token; `goodput` (default): the K with the most
expected tokens per second at the present load (TurboSpec 2406.14066), 0 included. A K that is decided acts on
the next round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import erfc, hypot, inf

from moot.core.speculation.costs import DraftCost, RoundTimes, VerifyCost
from moot.core.types import Verification


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a verify step, as this request sees it: `num_requests` verified together, itself included, and the
    number of tokens in the step that are not this request's.

    `overhead_seconds`: of a round, spent neither drafting nor on the verifier. `num_turns`: the steps that a verifier
    which never rests takes for one round of this request; 1 where requests do not wait for it. `num_own`: of the
    requests those of this router, which serves one after the other; this one included.
    """

    num_requests: float = 1
    num_other_tokens: float = 0
    overhead_seconds: float = 0.0
    num_turns: float = 1.0
    num_own: float = 1.0

    def moved(self, verification: Verification, num_drafted: int, usual: RoundTimes, rate: float) -> Load:
        """The load, moved towards what a round of `num_drafted` draft tokens has shared its step with."""
        rows = verification.batch_tokens - verification.batch_prefill_tokens
        others = max(rows - 1 - num_drafted, 0)
        return Load(
            self.num_requests + rate * (max(verification.batch_requests, 1) - self.num_requests),
            self.num_other_tokens + rate * (others - self.num_other_tokens),
            usual.overhead,
            usual.num_turns,
            self.num_own,
        )


@dataclass(frozen=True, slots=True)
class RoundSample:
    """One finished round. `num_speculative_tokens`: the K that was asked for; `num_drafted`: nodes verified;
    `num_offered`: nodes that could have been, had it paid; None: not more than were.

    `is_cut`: the request ended inside the round, so that tokens after the accepted ones were not tried.
    """

    num_speculative_tokens: int
    num_drafted: int
    num_accepted: int
    verify_seconds: float = 0.0
    is_cut: bool = False
    num_offered: int | None = None


def bound_length(num_speculative_tokens: int, prefix_length: int, context_limit: int, num_remaining: int) -> int:
    """The K that may be asked for: prefix + K + 1 <= `context_limit`, and K + 1 tokens at most may still be emitted."""
    return max(min(num_speculative_tokens, context_limit - prefix_length - 1, num_remaining - 1), 0)


_RETURN = 0.5
"""What is known of a K counts so much when K returns to it."""


class LengthPolicy(ABC):
    """Speculation length of one request."""

    @abstractmethod
    def next_length(self, load: Load) -> int:
        """K of the next round, before bounds. Called once per round."""

    def observe(self, sample: RoundSample) -> None:  # noqa: B027 - a fixed length learns nothing
        """Learn from a finished round."""


class Fixed(LengthPolicy):
    def __init__(self, num_speculative_tokens: int) -> None:
        self._length = num_speculative_tokens

    def next_length(self, load: Load) -> int:
        return self._length


class MinionsLength(LengthPolicy):
    """The length with the least verify time per token committed: one for all requests of a router.

    Both are summed over `window` rounds of one K; then K goes one towards the side on which a token costs less than on
    the other. Rounds of an older K, still under way when K moved, count for nothing, nor do those that a request's end
    cut short. What a K has shown before counts half at each return to it.
    """

    def __init__(self, start: int, max_length: int, window: int = 24) -> None:
        if not 1 <= start <= max_length or window < 1:
            raise ValueError("start must be in 1..max_length, window at least 1")
        self._length = start
        self._max_length = max_length
        self._window = window
        self._num_rounds = 0
        # Per K: seconds, tokens.
        self._sums = [[0.0, 0.0] for _ in range(max_length + 1)]
        self._last: tuple[int, float] | None = None
        """The K before this one, and its seconds per token."""

    def next_length(self, load: Load) -> int:
        return self._length

    def observe(self, sample: RoundSample) -> None:
        if sample.num_speculative_tokens != self._length or sample.is_cut:
            return
        sums = self._sums[self._length]
        sums[0] += sample.verify_seconds
        sums[1] += sample.num_accepted + 1
        self._num_rounds += 1
        if self._num_rounds >= self._window:
            self._move(sums[0] / sums[1])

    def _move(self, cost: float) -> None:
        length = self._length
        is_longer_better = True
        if self._last is not None:
            other, other_cost = self._last
            is_longer_better = cost <= other_cost if length > other else other_cost <= cost
        moved = min(length + 1, self._max_length) if is_longer_better else max(length - 1, 1)
        if moved == length and self._max_length > 1:
            # At an end: look at the neighbour, or the one that is left could never be found better.
            moved += 1 if length == 1 else -1
        self._last = length, cost
        self._length, self._num_rounds = moved, 0
        self._sums[moved] = [_RETURN * each for each in self._sums[moved]]


class Probes:
    """Counts rounds at K = 0. A probe is due after `after` of them, and each further one after twice as many as the one
    before, up to `at_most`; after one that was accepted whole the next is due at once. Probes are never due so often
    that they cost more than `share` of the time."""

    def __init__(self, after: int = 8, at_most: int = 128, share: float = 0.01) -> None:
        if not 1 <= after <= at_most or share <= 0:
            raise ValueError("after must be in 1..at_most, share above 0")
        self._after, self._at_most, self._share = after, at_most, share
        self._wait: int = after
        self._waited: float = 0

    def is_due(self, cost: float = 0.0) -> bool:
        """Called once for every round at K = 0. `cost`: of a probe, in rounds at K = 0."""
        self._waited += 1
        if self._waited <= max(self._wait, cost / self._share):
            return False
        self._waited, self._wait = 0, min(2 * self._wait, self._at_most)
        return True

    def accepted(self) -> None:
        """The last probe was accepted whole."""
        # It has paid for itself.
        self._wait, self._waited = self._after, inf

    def start_over(self) -> None:
        """Drafting pays again."""
        self._wait, self._waited = self._after, 0


LENGTHS = ("goodput", "minions", "fixed")
MOST_SPECULATIVE_TOKENS = 64
"""Greatest K that a request may ask for and a drafter drafts, where nothing else is said."""


class PositionAcceptance:
    """P(token at depth j accepted | all before it accepted), fading, with `prior` (the pool's) worth `strength` tokens.

    Counted against the K that was asked for: a draft that came out shorter, or not at all, missed. `offered`: nodes
    that the drafters offer per token asked for, which costs what it costs to verify them, and not more.
    """

    def __init__(
        self,
        max_length: int,
        prior: PositionAcceptance | None = None,
        prior_rate: float = 0.6,
        strength: float = 8.0,
        decay: float = 0.95,
    ) -> None:
        self._prior = prior
        self._prior_rate = prior_rate
        self._strength = strength
        self._decay = decay
        self._hits = [0.0] * max_length
        self._tried = [0.0] * max_length
        self._offered = 0.0
        self._rounds = 0.0

    @property
    def offered(self) -> float:
        prior = 1.0 if self._prior is None else self._prior.offered
        return (self._offered + self._strength * prior) / (self._rounds + self._strength)

    def rate(self, depth: int) -> float:
        prior = self._prior_rate if self._prior is None else self._prior.rate(depth)
        return (self._hits[depth] + self._strength * prior) / (self._tried[depth] + self._strength)

    def observe(self, sample: RoundSample) -> None:
        tried = sample.num_accepted + (not sample.is_cut)
        for depth in range(min(tried, sample.num_speculative_tokens, len(self._hits))):
            self._hits[depth] = self._hits[depth] * self._decay + (depth < sample.num_accepted)
            self._tried[depth] = self._tried[depth] * self._decay + 1.0
        num_offered = sample.num_drafted if sample.num_offered is None else sample.num_offered
        self._count(num_offered / sample.num_speculative_tokens)

    def suppose(self, like: PositionAcceptance) -> None:
        """Count a round without a draft as one like those that `like`, its request, has seen. Drafts are made where
        they are accepted; without the others the pool would tell a new request of the best requests only."""
        if self._hits:
            self._hits[0] = self._hits[0] * self._decay + like.rate(0)
            self._tried[0] = self._tried[0] * self._decay + 1.0
        self._count(like.offered)

    def _count(self, offered: float) -> None:
        self._offered = self._offered * self._decay + offered
        self._rounds = self._rounds * self._decay + 1.0


class Goodput(LengthPolicy):
    """K = argmax of E[tokens(K)] / T(K, load), every request of the batch taken to draft alike.

    E: 1 + sum over j of the product of the first j acceptances, smoothed per request over the pool's. T: measured draft
    time, measured cost of a step with num_requests * (1 + draft nodes) tokens, and the load's overhead; where requests
    wait for the verifier, drafting hides in the steps of others (see _seconds). K moves only for a gain of more than
    `hysteresis`, and to 0 as soon as drafting promises next to nothing. At K = 0 nothing is learned about acceptance,
    so a probe that is due, by this request's count or by the pool's (requests may be shorter than any wait), drafts
    `probe_length` tokens; where even drafts that are nearly always accepted would not pay (a saturated verifier), none
    is made.
    """

    PROBE_HOPE = 0.95

    def __init__(
        self,
        max_length: int,
        verify_cost: VerifyCost,
        draft_cost: DraftCost,
        pool: PositionAcceptance,
        pool_probes: Probes | None = None,
        hysteresis: float = 0.05,
        probe_length: int = 2,
        router_cost: DraftCost | None = None,
    ) -> None:
        """`router_cost`: of the draft time what the router itself is busy with; None: nothing."""
        self._max_length = max_length
        self._verify_cost = verify_cost
        self._draft_cost = draft_cost
        self._router_cost = router_cost or DraftCost()
        self._pool = pool
        self._acceptance = PositionAcceptance(max_length, pool)
        self._hysteresis = hysteresis
        self._probes = Probes()
        self._pool_probes = pool_probes or Probes()
        self._probe_length = min(probe_length, max_length)
        self._length: int | None = None
        self._rest = 0
        """Rounds at K = 0 that need no decision."""
        self._nodes_per_token = self._acceptance.offered

    def next_length(self, load: Load) -> int:
        if self._length == 0 and self._rest > 0 and load.num_requests >= _MANY:
            self._rest -= 1
            return 0
        self._rest = _REST
        rates = [self._acceptance.rate(depth) for depth in range(self._max_length)]
        goodput = self.goodputs(rates, load)
        best = max(range(self._max_length + 1), key=goodput.__getitem__)
        if goodput[best] < _WORTHWHILE * goodput[0]:
            best = 0
        margin = 1 + self._hysteresis
        if best == 0 or goodput[best] > margin * goodput[self._length or 0]:
            if self._length == 0 and best:
                self._probes.start_over()
                # What pays for this request may pay for the next.
                self._pool_probes.accepted()
            if best == 0:
                # How much of a draft was worth verifying says nothing about the load under which drafting may return;
                # how much was there to verify does.
                self._nodes_per_token = self._acceptance.offered
            self._length = best
        elif self._length is None:
            self._length = 0
        if self._length > 0:
            return self._length
        cost = self._probe_cost(load)
        # Both count, whichever is due.
        if not self._probes.is_due(cost) | self._pool_probes.is_due(cost):
            return 0
        hoped = self.goodputs([self.PROBE_HOPE] * self._max_length, load)
        return self._probe_length if max(hoped) > (1 + self._hysteresis) * hoped[0] else 0

    def observe(self, sample: RoundSample) -> None:
        if sample.num_speculative_tokens <= 0:
            self._pool.suppose(self._acceptance)
            return
        self._acceptance.observe(sample)
        self._pool.observe(sample)
        if self._length == 0 and sample.num_accepted == sample.num_speculative_tokens:
            self._probes.accepted()
            self._pool_probes.accepted()
        ratio = sample.num_drafted / sample.num_speculative_tokens
        self._nodes_per_token += _NODES_RATE * (ratio - self._nodes_per_token)

    def _probe_cost(self, load: Load) -> float:
        """Cost of a probe, in rounds at K = 0: the slower step is paid by every request in it, the drafting by this
        one."""
        before = round(load.num_other_tokens) + 1
        nodes = max(round(self._probe_length * self._nodes_per_token), 1)
        step = self._verify_cost.seconds(before)
        slower = self._verify_cost.seconds(before + nodes) - step
        drafting = self._draft_cost.seconds(self._probe_length) if load.num_turns < _TURNS else 0.0
        # The others of this router wait while it is busy with this one.
        own = self._router_cost.seconds(self._probe_length)
        return (load.num_requests * slower + (load.num_own - 1) * own + drafting) / (step + load.overhead_seconds)

    def goodputs(self, rates: list[float], load: Load) -> list[float]:
        """Expected tokens per second of one request for K = 0, 1, ..., given its acceptance per depth."""
        expected, reached = 1.0, 1.0
        result: list[float] = []
        for length in range(self._max_length + 1):
            if length:
                reached *= rates[length - 1]
                expected += reached
            # No more is accepted than is verified, and the vote sends only what pays.
            result.append(min(expected, 1 + self._nodes_per_token * length) / self._seconds(length, load))
        return result

    def _seconds(self, length: int, load: Load) -> float:
        """Seconds of a round at K = `length`. Requests that wait for the verifier come in groups, one per step: as few
        as let each group draft while the others are verified. Of the smallest such number, or of one request each. A
        draft that comes too late for its group's step, as durations vary, waits for one more. Whatever drafting takes
        of the router's own time, its requests in a group wait for one after the other.
        """
        tokens = 1 + self._nodes_per_token * length
        drafting = self._draft_cost.seconds(length)
        alone = drafting + load.overhead_seconds
        cost = self._verify_cost.seconds
        own = self._router_cost.seconds(length)
        if load.num_turns < _TURNS:
            return alone + (load.num_own - 1) * own + cost(round(load.num_requests * tokens))
        batched = load.num_requests * load.num_turns
        groups = 2
        while True:
            step = cost(round(max(batched / groups, 1.0) * tokens))
            room = (groups - 1) * step
            apart = alone + max(load.num_own * load.num_turns / groups - 1, 0.0) * own
            if room >= _HIDDEN * apart or groups >= batched:
                varying = _DEVIATIONS * hypot(self._draft_cost.spread * drafting, self._verify_cost.spread * step)
                late = _above((apart - room) / max(varying, 1e-9)) if length and groups < batched else 0.0
                return max(apart + step, groups * step) + late * step
            groups += 1


def _above(deviations: float) -> float:
    """P(a normal variable > 0), its mean so many standard deviations above 0."""
    return 0.5 * erfc(-deviations * 0.5**0.5)


_NODES_RATE = 0.2
"""How fast the part of its drafts that is verified follows a request's rounds."""
_DEVIATIONS = 0.8
"""Deviation of what is late, in mean distances of the durations. Chosen in simulation with durations 30 % off (seeds 1
to 7): 0.5 is as good, none and 1.25 (a normal variable's) are worse; lab.bench.length_sweep takes other seeds."""
_WORTHWHILE = 1.02
"""What drafting must promise over K = 0: less drowns in what it costs others, and in how well costs are known."""
_MANY, _REST = 8, 3
"""Of so many requests at once, each that drafts nothing decides again after so many rounds only: what deciding costs is
lost to a machine that is full, and the others find out in the meantime."""
_TURNS = 1.3
"""From so many turns on requests are taken to rotate in groups."""
_HIDDEN = 0.9
"""Part of drafting that must fit into the other groups' steps: a little late is made up for in the next step."""
