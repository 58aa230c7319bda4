"""How many tokens to ask the drafters for: K. Durations, in seconds, are arguments; there is no clock.

`fixed`; `minions` (2402.15678): climb along the trend of verify time per token; `goodput` (default, in goodput.py).
A K that is decided acts on the next round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from math import inf

from moot.core.costs import RoundTimes
from moot.core.types import Verification


@dataclass(frozen=True, slots=True)
class Load:
    """What shares a verify step with this request: `num_requests` verified together, itself included, and the number
    of tokens in the step that are not this request's.

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
        """Towards what a round of `num_drafted` draft tokens has shared its step with."""
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


class Minions(LengthPolicy):
    """Minimise verify time / tokens committed. Over the last `window` rounds of the present K fit a line: falling by
    more than `tolerance` of its mean raises K by one, rising lowers it by `penalty`. Rounds of an older K, still under
    way when K moved, count for nothing, and after a move the window starts empty.
    """

    def __init__(self, start: int, max_length: int, window: int = 8, tolerance: float = 0.02, penalty: int = 2) -> None:
        if not 1 <= start <= max_length or window < 2:
            raise ValueError("start must be in 1..max_length, window at least 2")
        self._length = start
        self._max_length = max_length
        self._tolerance = tolerance
        self._penalty = penalty
        self._samples: deque[float] = deque(maxlen=window)

    def next_length(self, load: Load) -> int:
        return self._length

    def observe(self, sample: RoundSample) -> None:
        if sample.num_speculative_tokens != self._length or sample.is_cut:
            return
        self._samples.append(sample.verify_seconds / (sample.num_accepted + 1))
        if len(self._samples) < (self._samples.maxlen or 0):
            return
        trend = _relative_trend(list(self._samples))
        if trend < -self._tolerance:
            moved = min(self._length + 1, self._max_length)
        elif trend > self._tolerance:
            moved = max(self._length - self._penalty, 1)
        else:
            return
        if moved != self._length:
            self._length = moved
            self._samples.clear()


def _relative_trend(samples: list[float]) -> float:
    """Change of the least-squares line over the window, relative to the mean."""
    count = len(samples)
    middle, mean = (count - 1) / 2, sum(samples) / count
    if mean <= 0:
        return 0.0
    slope = sum((i - middle) * (y - mean) for i, y in enumerate(samples)) / sum((i - middle) ** 2 for i in range(count))
    return slope * (count - 1) / mean


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
