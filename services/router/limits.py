"""How many choices may be in flight: per caller (429) and over all (503). Refusing is immediate, nothing waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from moot.core.errors import Draining, NoCapacity, RateLimited


class Admission:
    """Counts choices in flight. A request enters with one and grows when it is known how many it asks for.

    Of one event loop.
    """

    def __init__(self, *, max_in_flight: int, max_per_caller: int, retry_after_s: float) -> None:
        self._max_in_flight = max_in_flight
        self._max_per_caller = max_per_caller
        self._retry_after_s = retry_after_s
        self._per_caller: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
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
            raise Draining("this server is shutting down", self._retry_after_s)
        ticket = Ticket(self, caller)
        ticket.grow(1)
        return ticket

    def _take(self, caller: str, count: int) -> None:
        if self._per_caller[caller] + count > self._max_per_caller:
            raise RateLimited(
                f"too many choices in flight for this caller (limit {self._max_per_caller})", self._retry_after_s
            )
        if self.num_in_flight + count > self._max_in_flight:
            raise NoCapacity("the server is full", self._retry_after_s)
        self._per_caller[caller] += count
        self._idle.clear()

    def _give_back(self, caller: str, count: int) -> None:
        self._per_caller[caller] -= count
        if self._per_caller[caller] <= 0:
            del self._per_caller[caller]
        if not self._per_caller:
            self._idle.set()


class Ticket:
    """The places of one request; a context manager that gives them back."""

    def __init__(self, admission: Admission, caller: str) -> None:
        self._admission = admission
        self._caller = caller
        self._places = 0

    def grow(self, places: int) -> None:
        """Take places until there are `places`. Raises RateLimited or NoCapacity and keeps what it had."""
        if places > self._places:
            self._admission._take(self._caller, places - self._places)
            self._places = places

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._places:
            self._admission._give_back(self._caller, self._places)
            self._places = 0
