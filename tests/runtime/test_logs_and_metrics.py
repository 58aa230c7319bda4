"""What operators read: one JSON object a line, metrics with help and no NaN, probes that answer."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moot.core.errors import ConfigError
from moot.runtime.admin import AdminServer
from moot.runtime.faults import Fault, fault_delay_s, parse_faults
from moot.runtime.logs import JsonFormatter, request_id_var
from moot.runtime.metrics import Metrics
from moot.runtime.process import ServiceOptions


def test_a_log_line_is_json_with_the_request_id_and_without_exception_text() -> None:
    """Lines can be searched by request; what an exception quotes may be a user's text, so only frames are logged."""
    logger = logging.getLogger("test")
    token = request_id_var.set("req-1")
    try:
        try:
            raise ValueError("the secret prompt")
        except ValueError:
            import sys

            record = logger.makeRecord("test", logging.ERROR, "f", 1, "failed", (), sys.exc_info(), extra={"k": 3})
        entry = json.loads(JsonFormatter("router").format(record))
    finally:
        request_id_var.reset(token)
    assert (entry["message"], entry["request_id"], entry["k"], entry["service"]) == ("failed", "req-1", 3, "router")
    assert entry["error"] == "ValueError"
    assert "secret" not in json.dumps(entry)


def test_metrics_have_help_the_prefix_and_no_nan_before_the_first_request() -> None:
    """Before anything happened every sample is a number, and every family says what it is."""
    families = list(text_string_to_metric_families(Metrics("router").exposition().decode()))
    assert families
    (build,) = [family for family in families if family.name == "moot_build_info"]
    assert [sample.labels["service"] for sample in build.samples] == ["router"]
    for family in families:
        assert family.name.startswith("moot_")
        assert family.documentation
        assert all(sample.value == sample.value for sample in family.samples)


def test_a_gateway_finds_three_gauges_under_vllms_names_when_asked_for() -> None:
    """The Gateway API Inference Extension reads queue, running and KV use by vLLM's names: the same values, live."""
    metrics = Metrics("verifier")
    assert b"vllm:" not in metrics.exposition()
    metrics.add_vllm_names("model-x")
    metrics.num_requests_running.set(3)
    metrics.num_requests_waiting.set(2)
    metrics.kv_cache_usage_ratio.set(0.25)
    samples = [
        (family.type, sample.name, sample.labels["model_name"], sample.value)
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name.startswith("vllm:")
    ]
    assert samples == [
        ("gauge", "vllm:num_requests_running", "model-x", 3),
        ("gauge", "vllm:num_requests_waiting", "model-x", 2),
        ("gauge", "vllm:kv_cache_usage_perc", "model-x", 0.25),
    ]


@pytest.mark.parametrize("host", ["::1", "::", "localhost", "127.0.0.1", "0.0.0.0"])
def test_the_admin_port_listens_on_both_families(host: str) -> None:
    """A pod with IPv6 only is probed and scraped like any other; `::` and `0.0.0.0` mean every address of a kind."""
    admin = AdminServer(Metrics().registry, ServiceOptions(host=host, metrics_port=0))
    loopback = "[::1]" if ":" in host else "127.0.0.1"
    try:
        assert httpx.get(f"http://{loopback}:{admin.port}/livez", timeout=5).status_code == 200
    finally:
        admin.close()


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_cannot_be_bound_is_one_sentence(host: str, port: int) -> None:
    """A name without an address, an address of another machine and an impossible port are refused alike."""
    with pytest.raises(ConfigError, match="cannot serve metrics"):
        AdminServer(Metrics().registry, ServiceOptions(host=host, metrics_port=port))


def test_the_admin_port_serves_metrics_and_probes() -> None:
    """Probes tell the truth of their callbacks, on a port of their own."""
    ready = False
    admin = AdminServer(Metrics().registry, ServiceOptions(host="127.0.0.1", metrics_port=0), ready=lambda: ready)

    def status(path: str) -> int:
        return httpx.get(f"http://127.0.0.1:{admin.port}{path}", timeout=5).status_code

    try:
        assert (status("/livez"), status("/readyz"), status("/metrics"), status("/x")) == (200, 503, 200, 404)
        ready = True
        assert status("/readyz") == 200
    finally:
        admin.close()


def test_fault_points_are_parsed_strictly() -> None:
    """A mistyped fault must not make a fault test pass by doing nothing."""
    parsed = parse_faults("verifier.step=delay:0.5; verifier.logits=nan@req-7")
    assert parsed == {"verifier.step": Fault("delay", "0.5"), "verifier.logits": Fault("nan", "", "req-7")}
    assert fault_delay_s(parsed["verifier.step"]) == 0.5
    assert fault_delay_s(None) == 0.0
    with pytest.raises(ConfigError, match="verifier.step"):
        parse_faults("verifier.step")
