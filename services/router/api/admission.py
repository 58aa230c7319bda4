"""Admission: how many choices may be in flight and how many tokens may wait, per caller (429) and over all (503).

Nothing waits here: a refusal is immediate, and says when to come again. `TokenQueue` bounds the tokens of accepted
choices that no verifier has begun yet, over all and per caller; a `CallerLoad` measures how fast they go.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from moot.core.errors import Draining, NoCapacity, RateLimited
from moot.runtime.metrics import Metrics
from services.router.api.settings import HttpSettings
from services.router.generation.request_types import Places

MOST_RETRY_S = 60.0
"""No caller is sent away for longer: what is estimated from the last half minute says little of what comes after."""

_MEMORY_S = 30.0
_RESUMES_BELOW = 0.5
"""Of the level at which drafting stops: between the two nothing changes, so that it does not flicker."""


class CallerLoad:
    """What callers have under way, in an amount of one kind, and how fast it goes: amounts per second of the time in
    which there was any, fading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.of_callers: Counter[str] = Counter()
        self.total = 0
        self._served = self._seconds = 0.0
        self._clock = clock
        self._seen = clock()

    def add(self, caller: str, amount: int) -> None:
        self._note_time()
        self.total += amount
        self.of_callers[caller] += amount

    def serve(self, caller: str, amount: int) -> None:
        """Note that so much of a caller's is done, or given up."""
        self.add(caller, -amount)
        self._served += amount
        if self.of_callers[caller] <= 0:
            del self.of_callers[caller]

    def retry_after_s(self, amount: float | None, otherwise: float) -> float:
        """Seconds to send a caller away for: until so much is served, within bounds. `otherwise`: where nothing was, or
        `amount` is not known."""
        self._note_time()
        if amount is not None and self._served > 0:
            otherwise = amount * self._seconds / self._served
        return min(max(otherwise, 1.0), MOST_RETRY_S)

    def _note_time(self) -> None:
        now = self._clock()
        if self.total > 0:
            fade = math.exp((self._seen - now) / _MEMORY_S)
            self._served *= fade
            self._seconds = self._seconds * fade + now - self._seen
        self._seen = now


class TokenQueue:
    """The tokens of accepted choices that wait for a verifier, prompt plus `max_tokens` of each. Of one event loop.
    `on_change` is called after every change of `num_tokens`."""

    def __init__(
        self,
        settings: HttpSettings,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._load = CallerLoad(clock)
        self._on_change = on_change
        self.is_shedding = False
        """Whether so much waits that drafting should stop."""

    @property
    def num_tokens(self) -> int:
        return self._load.total

    def check(self, caller: str, num_tokens: int = 1) -> None:
        """Raises RateLimited or NoCapacity where `num_tokens` more would be too many.

        A request that is above a bound on its own is let in when nothing else waits: it must not starve. Callers
        without a key cannot be told apart: they have no share each.
        """
        settings, load = self._settings, self._load
        own = load.of_callers[caller] if caller else 0
        if own > 0 and (excess := own + num_tokens - settings.max_queued_tokens_per_key) > 0:
            # A caller's share of what is served is its share of what waits.
            retry_after_s = load.retry_after_s(excess * load.total / own, settings.retry_after_s)
            problem = f"too many tokens of this caller wait (limit {settings.max_queued_tokens_per_key})"
            raise RateLimited(problem, retry_after_s, "caller_tokens")
        if load.total > 0 and (excess := load.total + num_tokens - settings.max_queued_tokens) > 0:
            problem = f"too many tokens wait (limit {settings.max_queued_tokens})"
            raise NoCapacity(problem, load.retry_after_s(excess, settings.retry_after_s), "tokens")

    def put(self, caller: str, amounts: Sequence[int]) -> list[QueuePlace]:
        """Queue all choices of a request, or none. Raises as `check`."""
        self.check(caller, sum(amounts))
        self._load.add(caller, sum(amounts))
        self._judge()
        return [QueuePlace(self, caller, amount) for amount in amounts]

    def leave(self, caller: str, num_tokens: int) -> None:
        self._load.serve(caller, num_tokens)
        self._judge()

    def _judge(self) -> None:
        level = self._settings.shed_share * self._settings.max_queued_tokens
        if self._settings.shed_share < 1:
            self.is_shedding = self.num_tokens > (level * _RESUMES_BELOW if self.is_shedding else level)
        self._on_change()


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
        self.queue = TokenQueue(settings, self._note_queue, clock)
        metrics.queued_tokens_limit.set(settings.max_queued_tokens)
        self._load = CallerLoad(clock)
        self.draining = False
        """Whether every new request is refused; those inside go on."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_shedding = False
        """Whether drafting should stop: refusing is the next thing that happens."""
        self.aborting = asyncio.Event()
        """Set when those inside have had their time: each ends itself with Draining."""

    @property
    def num_in_flight(self) -> int:
        return self._load.total

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
        if self.draining:
            raise Draining("this server is shutting down", self._settings.retry_after_s)
        # Before the body is read: where the queue is full, how long this prompt is makes no difference.
        self.queue.check(caller)
        ticket = Ticket(self, caller)
        ticket.grow(1)
        return ticket

    def _take(self, caller: str, count: int, held: int) -> None:
        settings, places = self._settings, self._places()
        own, others = self._load.of_callers[caller] + count, self.num_in_flight + count
        if own > settings.max_choices_per_key:
            problem = f"too many choices in flight for this caller (limit {settings.max_choices_per_key})"
            # A caller's share of the ends is its share of what is in flight.
            share = self._load.of_callers[caller] / max(self.num_in_flight, 1)
            raise RateLimited(problem, self._retry_after_s(own - settings.max_choices_per_key, share), "caller_choices")
        if others > settings.max_choices_in_flight:
            retry_after_s = self._retry_after_s(others - settings.max_choices_in_flight)
            raise NoCapacity("the server is full", retry_after_s, "choices")
        most = None if places is None else places.num_running + places.num_waiting
        # A request for more choices than there are places is served in turns, when nothing else is.
        if most is not None and others > most and self.num_in_flight > held:
            raise NoCapacity("the verifiers are full", self._retry_after_s(others - most), "places")
        self._load.add(caller, count)
        self._idle.clear()
        self._judge()

    def _give_back(self, caller: str, count: int) -> None:
        self._load.serve(caller, count)
        if not self.num_in_flight:
            self._idle.set()
        self._judge()

    def _retry_after_s(self, count: int, share: float = 1.0) -> float:
        """Seconds until so many choices have ended, of which `share` belongs to the caller."""
        return self._load.retry_after_s(count / share if share > 0 else None, self._settings.retry_after_s)

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
        self.caller = caller
        self._places = 0
        self._queued: list[QueuePlace] = []

    def grow(self, places: int) -> None:
        """Take places until there are `places`. Raises RateLimited or NoCapacity and keeps what it had."""
        if places > self._places:
            self._admission._take(self.caller, places - self._places, self._places)
            self._places = places

    def queue(self, amounts: Sequence[int]) -> list[QueuePlace]:
        """Have the choices' tokens wait, each until its place is left. Raises RateLimited or NoCapacity."""
        self._queued = self._admission.queue.put(self.caller, amounts)
        return self._queued

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for place in self._queued:
            place.leave()
        if self._places:
            self._admission._give_back(self.caller, self._places)
            self._places = 0
