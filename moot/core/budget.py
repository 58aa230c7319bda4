"""One budget of draft nodes for each verifier, spent on the best nodes of all requests that share its steps.

Requests decide one after the other and wait for none. Each leaves here what its latest nodes promise, in seconds; the
best of all, as many as pay for a slower step, go into a batch, and the least of them is the price of a node. A request
sends its nodes that are worth the price: what others offered last stands for what they will offer to this step. The
price rises with the load, and at saturation no node is worth it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import inf, nextafter

from moot.core.shapes import worth

_LOOKS = 8
"""So many times the price is worked out anew while every request takes one turn."""


class Budget:
    """Of one verifier. `seconds(n)`: expected duration of a step with n tokens, never falling."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        # Request to what its nodes are worth, negated, best first; and all of them in order.
        self._offers: dict[object, list[float]] = {}
        self._all: list[float] = []
        self._num_new = 0
        self.price = 0.0
        """Seconds that a node must promise to be sent."""

    def __len__(self) -> int:
        """Requests that share it."""
        return len(self._offers)

    def spend(self, request: object, values: Sequence[float], num_requests: float) -> int:
        """How many of its leading nodes `request` sends. Replaces what it offered before.

        `values`: seconds of one request that each node is expected to save, never rising; infinite: it is sent in any
        case. `num_requests` >= 1: in one step of the verifier, those of other routers included.
        """
        self._withdraw(request)
        offer = self._offers[request] = [-value for value in values]
        for negated in offer:
            insort(self._all, negated)
        self._num_new += 1
        if self._num_new * _LOOKS >= len(self._offers):
            self._num_new = 0
            self.price = self._priced(num_requests)
        count = 0
        while count < len(offer) and -offer[count] >= self.price:
            count += 1
        return count

    def leave(self, request: object) -> None:
        """The request has ended, or goes to another verifier."""
        self._withdraw(request)
        self._offers.pop(request, None)

    def _withdraw(self, request: object) -> None:
        for negated in self._offers.get(request, ()):
            del self._all[bisect_left(self._all, negated)]

    def _priced(self, num_requests: float) -> float:
        # Those known here stand for all of a step: others' routers see requests of the same kinds.
        known, per_request = len(self._offers), num_requests / len(self._offers)

        def cost(num_nodes: int) -> float:
            # A slower step is paid by each of its requests.
            return known * self._seconds(round(num_requests + num_nodes * per_request))

        values = [-negated for negated in self._all]
        fixed = bisect_left(self._all, nextafter(-inf, 0.0))
        count = fixed + worth(values[fixed:], 1.0, lambda num_nodes: cost(fixed + num_nodes))
        if count == len(values):
            return values[-1] if count > fixed else 0.0
        if count > fixed and values[count - 1] > values[count]:
            return values[count - 1]
        # Nobody sends what is only as good as what does not fit.
        return nextafter(values[count], inf)
