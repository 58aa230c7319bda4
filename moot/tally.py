"""A histogram that one thread moves: no lock, and one addition for many equal values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Tally:
    """Counts of values by bucket. Only one thread may `observe`; any may read.

    The library's own histogram takes a lock for each of its numbers, which costs a round more than its vote's walk.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the buckets' upper bounds, included, rising."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Per bucket; the last is beyond all bounds."""
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, count: int = 1) -> None:
        """`count` values of this size."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count


class TallyFamily(Collector):
    """Tallies of one metric, by the values of its labels. Without labels there is one, from the start.

    `registry`: where it is exposed, or None.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str], registry: CollectorRegistry | None
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(bounds)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Tally:
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labels) or 'none'}")
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally(self._bounds)
        return tally

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        for values, tally in list(self._tallies.items()):
            reached = map(float, accumulate(list(tally.counts)))
            family.add_metric(values, list(zip(names, reached, strict=True)), sum_value=tally.total)
        yield family
