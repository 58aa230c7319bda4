"""How many choices may be in flight and how many tokens may wait: per caller (429), over all (503). Nothing waits here:
a refusal is immediate, and says when to come again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

from moot.core.errors import Draining, NoCapacity, RateLimited
from moot.metrics import Metrics
from services.router.settings import HttpSettings, Places
from services.router.token_queue import QueueLimits, QueuePlace, ServiceRate, TokenQueue, bounded_retry_s


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
        """From now on every new request is refused; those inside go on."""
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
        """Until so many choices have ended of which `share` belongs to whoever asks."""
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
