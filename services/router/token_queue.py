"""Tokens of accepted choices that no verifier has begun yet: bounded, over all and per caller, and how fast they go."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moot.core.errors import NoCapacity, RateLimited

MOST_RETRY_S = 60.0
"""Nobody is sent away for longer: what is estimated from the last half minute says little of what comes after."""

_MEMORY_S = 30.0
_RESUMES_BELOW = 0.5
"""Of the level at which drafting stops: between the two nothing changes, so that it does not flicker."""


class ServiceRate:
    """Amounts served per second of the time in which somebody waited, fading. No clock: durations are arguments."""

    def __init__(self, memory_s: float = _MEMORY_S) -> None:
        self._memory_s = memory_s
        self._amount = 0.0
        self._seconds = 0.0

    def wait(self, seconds: float) -> None:
        """Somebody has waited for so long."""
        fade = math.exp(-seconds / self._memory_s)
        self._amount *= fade
        self._seconds = self._seconds * fade + seconds

    def serve(self, amount: float) -> None:
        self._amount += amount

    def seconds_for(self, amount: float) -> float | None:
        """How long serving so much would take; None while nothing was served yet."""
        return amount * self._seconds / self._amount if self._amount > 0 else None


def bounded_retry_s(estimate: float | None, otherwise: float) -> float:
    """Seconds to send a caller away for: the estimate within its bounds, `otherwise` where there is none."""
    return min(max(otherwise if estimate is None else estimate, 1.0), MOST_RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Tokens: prompt plus `max_tokens` of each choice. `shed_share`: part of `max_tokens` that may wait until drafting
    stops; 1: it never does."""

    max_tokens: int
    max_tokens_per_caller: int
    shed_share: float
    retry_after_s: float
    """Told while nothing was served yet."""


class TokenQueue:
    """Of one event loop. `on_change` is called after every change of `num_tokens`."""

    def __init__(
        self,
        limits: QueueLimits,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.num_tokens = 0
        self.is_shedding = False
        """Whether so much waits that drafting should stop."""
        self._per_caller: Counter[str] = Counter()
        self._rate = ServiceRate()
        self._on_change = on_change
        self._clock = clock
        self._seen = clock()

    def check(self, caller: str, num_tokens: int = 1) -> None:
        """Raises RateLimited or NoCapacity where `num_tokens` more would be too many.

        Whoever is above a bound on its own is let in when nothing else waits: it must not starve. Callers without a key
        cannot be told apart: they have no share each.
        """
        limits, own = self.limits, self._per_caller[caller] if caller else 0
        if own > 0 and (excess := own + num_tokens - limits.max_tokens_per_caller) > 0:
            # A caller's share of what is served is its share of what waits.
            retry_after_s = self._retry_after_s(excess * self.num_tokens / own)
            problem = f"too many tokens of this caller wait (limit {limits.max_tokens_per_caller})"
            raise RateLimited(problem, retry_after_s, "caller_tokens")
        if self.num_tokens > 0 and (excess := self.num_tokens + num_tokens - limits.max_tokens) > 0:
            problem = f"too many tokens wait (limit {limits.max_tokens})"
            raise NoCapacity(problem, self._retry_after_s(excess), "tokens")

    def put(self, caller: str, amounts: Sequence[int]) -> list[QueuePlace]:
        """All choices of a request, or none. Raises as `check`."""
        self.check(caller, sum(amounts))
        self._change(caller, sum(amounts))
        return [QueuePlace(self, caller, amount) for amount in amounts]

    def leave(self, caller: str, num_tokens: int) -> None:
        self._rate_to_now()
        self._rate.serve(num_tokens)
        self._change(caller, -num_tokens)

    def _change(self, caller: str, num_tokens: int) -> None:
        self._rate_to_now()
        self.num_tokens += num_tokens
        self._per_caller[caller] += num_tokens
        if self._per_caller[caller] <= 0:
            del self._per_caller[caller]
        level = self.limits.shed_share * self.limits.max_tokens
        if self.limits.shed_share < 1:
            self.is_shedding = self.num_tokens > (level * _RESUMES_BELOW if self.is_shedding else level)
        self._on_change()

    def _retry_after_s(self, excess: float) -> float:
        self._rate_to_now()
        return bounded_retry_s(self._rate.seconds_for(excess), self.limits.retry_after_s)

    def _rate_to_now(self) -> None:
        now = self._clock()
        if self.num_tokens > 0:
            self._rate.wait(now - self._seen)
        self._seen = now


class QueuePlace:
    """The tokens of one choice."""

    __slots__ = ("_caller", "_num_tokens", "_queue")

    def __init__(self, queue: TokenQueue, caller: str, num_tokens: int) -> None:
        self._queue = queue
        self._caller = caller
        self._num_tokens = num_tokens

    def leave(self) -> None:
        """A verifier has begun it, or nobody will. Again is harmless."""
        num_tokens, self._num_tokens = self._num_tokens, 0
        if num_tokens:
            self._queue.leave(self._caller, num_tokens)
