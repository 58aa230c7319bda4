"""Admission: how many choices may be in flight and how many tokens may wait, per caller (429) and over all (503).

Nothing waits here: a refusal is immediate, and says when to come again. `TokenQueue` bounds the tokens of accepted
choices that no verifier has begun yet, over all and per caller; `ServiceRate` is how fast they go.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from moot.core.errors import Draining, NoCapacity, RateLimited
from moot.runtime.metrics import Metrics
from services.router.api.settings import HttpSettings
from services.router.generation.request_types import Places

MOST_RETRY_S = 60.0
"""No caller is sent away for longer: what is estimated from the last half minute says little of what comes after."""

_MEMORY_S = 30.0
_RESUMES_BELOW = 0.5
"""Of the level at which drafting stops: between the two nothing changes, so that it does not flicker."""


class ServiceRate:
    """The rate of service: amounts per second of the time in which requests waited, fading. No clock: durations are
    arguments."""

    def __init__(self, memory_s: float = _MEMORY_S) -> None:
        self._memory_s = memory_s
        self._amount = 0.0
        self._seconds = 0.0

    def wait(self, seconds: float) -> None:
        """Note that requests have waited for so long."""
        fade = math.exp(-seconds / self._memory_s)
        self._amount *= fade
        self._seconds = self._seconds * fade + seconds

    def serve(self, amount: float) -> None:
        self._amount += amount

    def seconds_for(self, amount: float) -> float | None:
        """Seconds that serving so much would take; None while nothing was served yet."""
        return amount * self._seconds / self._amount if self._amount > 0 else None


def bounded_retry_s(estimate: float | None, otherwise: float) -> float:
    """Seconds to send a caller away for: the estimate within its bounds, `otherwise` where there is none."""
    return min(max(otherwise if estimate is None else estimate, 1.0), MOST_RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of the queue, in tokens: prompt plus `max_tokens` of each choice. `shed_share`: part of `max_tokens` that
    may wait until drafting stops; 1: it never does."""

    max_tokens: int
    max_tokens_per_caller: int
    shed_share: float
    retry_after_s: float
    """Told while nothing was served yet."""


class TokenQueue:
    """The tokens of accepted choices that wait for a verifier. Of one event loop. `on_change` is called after every
    change of `num_tokens`."""

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

        A request that is above a bound on its own is let in when nothing else waits: it must not starve. Callers
        without a key cannot be told apart: they have no share each.
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
        """Queue all choices of a request, or none. Raises as `check`."""
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
        """Leave the queue: a verifier has begun the choice, or none will. Calling it twice is harmless."""
        num_tokens, self._num_tokens = self._num_tokens, 0
        if num_tokens:
            self._queue.leave(self._caller, num_tokens)


class Admission:
    """Counts choices in flight. A request enters with one and grows when it is known how many it asks for.

    `places`: those of the verifiers that can be asked now, None where that is not known. Of one event loop.
    """

    def __init__(
        self,
        settings: HttpSettings,
        metrics: Metrics,
        places: Callable[[], Places | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._places = places
        self._clock = clock
        limits = QueueLimits(
            max_tokens=settings.max_queued_tokens,
            max_tokens_per_caller=settings.max_queued_tokens_per_key,
            shed_share=settings.shed_share,
            retry_after_s=settings.retry_after_s,
        )
        self.queue = TokenQueue(limits, self._note_queue, clock)
        metrics.queued_tokens_limit.set(limits.max_tokens)
        self._per_caller: Counter[str] = Counter()
        self._ends = ServiceRate()
        self._seen = clock()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_shedding = False
        """Whether drafting should stop: refusing is the next thing that happens."""
        self.aborting = asyncio.Event()
        """Set when those inside have had their time: each ends itself with Draining."""

    @property
    def num_in_flight(self) -> int:
        return self._per_caller.total()

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse every new request from now on; those inside go on."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight. False: `timeout_s` was over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def enter(self, caller: str) -> Ticket:
        """Raises Draining, RateLimited or NoCapacity. The ticket gives its places back when it is closed."""
        if self._draining:
            raise Draining("this server is shutting down", self._settings.retry_after_s)
        # Before the body is read: where the queue is full, how long this prompt is makes no difference.
        self.queue.check(caller)
        ticket = Ticket(self, caller)
        ticket.grow(1)
        return ticket

    def _take(self, caller: str, count: int, held: int) -> None:
        settings, places = self._settings, self._places()
        own, others = self._per_caller[caller] + count, self.num_in_flight + count
        if own > settings.max_choices_per_key:
            problem = f"too many choices in flight for this caller (limit {settings.max_choices_per_key})"
            # A caller's share of the ends is its share of what is in flight.
            share = self._per_caller[caller] / max(self.num_in_flight, 1)
            raise RateLimited(problem, self._retry_after_s(own - settings.max_choices_per_key, share), "caller_choices")
        if others > settings.max_choices_in_flight:
            retry_after_s = self._retry_after_s(others - settings.max_choices_in_flight)
            raise NoCapacity("the server is full", retry_after_s, "choices")
        most = None if places is None else places.num_running + places.num_waiting
        # A request for more choices than there are places is served in turns, when nothing else is.
        if most is not None and others > most and self.num_in_flight > held:
            raise NoCapacity("the verifiers are full", self._retry_after_s(others - most), "places")
        self._rate_to_now()
        self._per_caller[caller] += count
        self._idle.clear()
        self._judge()

    def _give_back(self, caller: str, count: int) -> None:
        self._rate_to_now()
        self._ends.serve(count)
        self._per_caller[caller] -= count
        if self._per_caller[caller] <= 0:
            del self._per_caller[caller]
        if not self._per_caller:
            self._idle.set()
        self._judge()

    def _retry_after_s(self, count: int, share: float = 1.0) -> float:
        """Seconds until so many choices have ended, of which `share` belongs to the caller."""
        self._rate_to_now()
        estimate = self._ends.seconds_for(count / share) if share > 0 else None
        return bounded_retry_s(estimate, self._settings.retry_after_s)

    def _rate_to_now(self) -> None:
        now = self._clock()
        if self._per_caller:
            self._ends.wait(now - self._seen)
        self._seen = now

    def _note_queue(self) -> None:
        self._metrics.queued_tokens.set(self.queue.num_tokens)
        self._judge()

    def _judge(self) -> None:
        places, share, is_shedding = self._places(), self._settings.shed_share, self.queue.is_shedding
        if places is not None and share < 1:
            is_shedding = is_shedding or self.num_in_flight > places.num_running + share * places.num_waiting
        if is_shedding != self.is_shedding:
            self.is_shedding = is_shedding
            self._metrics.degraded.labels("no_speculation").set(is_shedding)


class Ticket:
    """The places of one request; a context manager that gives them back."""

    def __init__(self, admission: Admission, caller: str) -> None:
        self._admission = admission
        self._caller = caller
        self._places = 0
        self._queued: list[QueuePlace] = []

    def grow(self, places: int) -> None:
        """Take places until there are `places`. Raises RateLimited or NoCapacity and keeps what it had."""
        if places > self._places:
            self._admission._take(self._caller, places - self._places, self._places)
            self._places = places

    def queue(self, amounts: Sequence[int]) -> list[QueuePlace]:
        """Have the choices' tokens wait, each until its place is left. Raises RateLimited or NoCapacity."""
        self._queued = self._admission.queue.put(self._caller, amounts)
        return self._queued

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in self._queued:
            place.leave()
        if self._places:
            self._admission._give_back(self._caller, self._places)
            self._places = 0
