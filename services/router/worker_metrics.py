"""The metrics of several workers as one exposition: every sample once per worker, told apart by a label."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_log = logging.getLogger("moot.router.workers")

_TIMEOUT_S = 2.0


class WorkerMetrics(Collector):
    """`addresses()`: base URL of the metrics of each worker that serves, by its name.

    A worker that does not answer in time is left out of this scrape.
    """

    def __init__(self, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._addresses = addresses
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """All workers' metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # so that registering asks no worker

    def collect(self) -> list[Metric]:
        addresses = self._addresses()
        if not addresses:
            return []
        with ThreadPoolExecutor(len(addresses)) as threads:
            texts = threads.map(_scrape, addresses.values())
        return merged(dict(zip(addresses, texts, strict=True)))


def merged(texts: Mapping[str, str]) -> list[Metric]:
    """Families of all expositions, each sample with the label `worker`: whose text it stood in."""
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in family.samples]
    return list(families.values())


def _scrape(address: str) -> str:
    try:
        with urllib.request.urlopen(f"{address}/metrics", timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError as error:
        _log.warning("a worker's metrics are missing", extra={"cause": type(error).__name__})
        return ""
