"""Three gauges a second time, under the names that inference gateways know from vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class VllmNames(Collector):
    """What an inference gateway reads of a model server, under the names that it knows from vLLM.

    Names: the Gateway API Inference Extension's model server protocol, column vLLM. `kv_cache_usage_perc` is a
    fraction from 0 to 1 in spite of its name. vLLM numbers the engines of one server; here there is one.
    """

    def __init__(self, model: str, *, running: Gauge, waiting: Gauge, kv_cache_usage: Gauge) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._gauges = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": waiting,
            "vllm:kv_cache_usage_perc": kv_cache_usage,
        }

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, gauge in self._gauges.items():
            for mirrored in gauge.collect():
                family = GaugeMetricFamily(name, mirrored.documentation, labels=tuple(self._labels))
                for sample in mirrored.samples:
                    family.add_metric(tuple(self._labels.values()), sample.value)
                yield family
