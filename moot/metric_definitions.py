"""What defines a metric: name, kind, text, labels and the services that own it; on a registry of one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moot.tally import Tally, TallyFamily

ROUTER, VERIFIER, DRAFTER = SERVICES = ("router", "verifier", "drafter")


@dataclass(frozen=True, slots=True)
class Definition:
    """`name`: as it stands in a query, `_total` included. `kind`: counter, gauge or histogram."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    owners: tuple[str, ...]


class Definitions:
    """Defines metrics, and exposes those that `service` owns; without a service all of them."""

    def __init__(self, service: str = "") -> None:
        self.registry = CollectorRegistry()
        self.definitions: list[Definition] = []
        self._service = service

    def exposition(self) -> bytes:
        """The service's metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str, by: tuple[str, ...] = (ROUTER,)) -> Counter:
        registry = self._registry_for(f"{name}_total", "counter", text, labels, by)
        return Counter(f"moot_{name}", text, labels, registry=registry)

    def _gauge(self, name: str, text: str, *labels: str, by: tuple[str, ...] = (ROUTER,)) -> Gauge:
        return Gauge(f"moot_{name}", text, labels, registry=self._registry_for(name, "gauge", text, labels, by))

    def _histogram(self, name: str, text: str, buckets: Iterable[float], by: tuple[str, ...] = (ROUTER,)) -> Histogram:
        registry = self._registry_for(name, "histogram", text, (), by)
        return Histogram(f"moot_{name}", text, (), buckets=tuple(buckets), registry=registry)

    def _tally(self, name: str, text: str, buckets: Iterable[float]) -> Tally:
        """Of values that the event loop's thread alone observes."""
        return self._tallies(name, text, buckets).labels()

    def _tallies(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> TallyFamily:
        registry = self._registry_for(name, "histogram", text, labels, (ROUTER,))
        return TallyFamily(f"moot_{name}", text, tuple(buckets), labels, registry)

    def _registry_for(
        self, name: str, kind: str, text: str, labels: tuple[str, ...], owners: tuple[str, ...]
    ) -> CollectorRegistry | None:
        self.definitions.append(Definition(f"moot_{name}", kind, text, labels, owners))
        return self.registry if self._service in ("", *owners) else None
