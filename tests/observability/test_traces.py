"""One request is one trace, through every process that has a part in it; and nothing at all unless asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from moot.core.errors import ConfigError
from moot.runtime.tracing import checked_traceparent, open_tracing
from tests.integration.asking import Ask
from tests.integration.looping_model import make_looping_model
from tests.integration.whole_system import System, running
from tests.observability.needed_tools import module
from tests.observability.otlp_collector import Collector, Seen
from tests.waiting import until

module("opentelemetry.sdk.trace", "opentelemetry-sdk")
module("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http")

CALLER = "00f067aa0ba902b7"
CANARY = "canary prompt ha ha ha"


@dataclass(frozen=True, slots=True)
class Traced:
    system: System
    collector: Collector

    def wait(self, trace_id: str, num_spans: int) -> list[Seen]:
        """Spans leave a moment after they ended; the caller's own is not among them."""
        return list(
            until(
                lambda: found if len(found := self.collector.spans(trace_id)) >= num_spans else None,
                f"{num_spans} spans of trace {trace_id}",
                20,
            )
        )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A router and two verifiers that send their spans soon."""
    folder = tmp_path_factory.mktemp("traced")
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running(folder / "logs", make_looping_model(folder / "model"), verifiers=2) as system:
            yield Traced(system, collector)


def ask(system: System, trace_id: str) -> httpx.Response:
    return httpx.post(
        f"{system.url}/v1/completions",
        json={"model": "tiny", "prompt": CANARY, "max_tokens": 12, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-{CALLER}-01"},
        timeout=60,
    )


def test_a_request_is_one_trace_from_its_caller_to_its_verifier(traced: Traced) -> None:
    """The caller's span is the router's parent, the router's the verifier's; each tells what it did; nobody tells what
    was written."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer = ask(traced.system, trace_id).json()
    spans = traced.wait(trace_id, 2)
    assert len(spans) == 2
    by_service = {span.service: span for span in spans}
    request, session = by_service["moot-router"], by_service["moot-verifier"]
    assert (request.parent_id, session.parent_id) == (CALLER, request.span_id)
    assert not request.is_error
    assert not session.is_error
    assert request.facts["finish_reason"] == "length"
    assert request.facts["num_output_tokens"] == session.facts["num_output_tokens"] == 12
    assert request.facts["num_rounds"] == session.facts["num_rounds"] > 0
    assert str(request.facts["request_id"]).startswith(answer["id"])
    assert request.facts["request_id"] == session.facts["request_id"]
    assert b"canary" not in traced.collector.raw
    assert answer["choices"][0]["text"].encode() not in traced.collector.raw


def test_a_request_without_a_context_begins_a_trace_of_its_own(traced: Traced) -> None:
    """Nothing that is no context goes into a message: whoever sends one gets a new trace."""
    before = len({span.trace_id for span in traced.collector.spans()})
    ask(traced.system, "not a trace id")
    until(lambda: len({span.trace_id for span in traced.collector.spans()}) > before, "a new trace")


def test_a_request_that_moves_has_a_session_for_each_verifier(traced: Traced) -> None:
    """A verifier that goes away hands over: its span and the next one's hang on the same request."""
    system = traced.system
    moving = Ask(system.router.port, {"model": "tiny", "prompt": "ha ha", "max_tokens": 1500, "ignore_eos": True})
    moving.wait_tokens(5)
    max(system.verifiers, key=lambda verifier: verifier.metric("moot_num_sessions")).terminate()
    until(lambda: moving.is_over, "the request ends")
    assert moving.reply.finish_reason == "length"

    def of_the_request() -> list[Seen]:
        every = traced.collector.spans()
        return [span for span in every if span.facts.get("num_output_tokens") == 1500 and span.service == "moot-router"]

    (request,) = until(of_the_request, "the request's span")
    spans = until(
        lambda: found if len(found := traced.collector.spans(request.trace_id)) == 3 else None, "both sessions", 20
    )
    sessions = [span for span in spans if span.service == "moot-verifier"]
    assert {session.parent_id for session in sessions} == {request.span_id}
    assert not request.is_error
    # Each counts what it ended with: the second took over what the first had committed.
    assert max(session.facts["num_output_tokens"] for session in sessions) == 1500


def test_without_a_collector_nothing_is_recorded_and_the_context_goes_on() -> None:
    """Off is the default: neither recorder nor exporter is loaded, also by other variables of OpenTelemetry's, and a
    caller's context goes through as it came."""
    script = f"""
import sys
from moot.runtime.tracing import open_tracing
tracing = open_tracing("router", {{}})
for parent in ("", "00-4bf92f3577b34da6a3ce929d0e0e4736-{CALLER}-01"):
    span = tracing.begin("request", parent, request_id="x")
    span.note(num=1)
    assert span.traceparent == parent, span.traceparent
    span.end("Error")
tracing.close()
assert not any(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")) for name in sys.modules)
"""
    environ = {**os.environ, "OTEL_PYTHON_TRACER_PROVIDER": "sdk_tracer_provider"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environ, timeout=60, check=False)
    assert done.returncode == 0


def test_a_collector_without_the_packages_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who asks for traces and gets none must hear of it at the start."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"moot\[tracing\]"):
        open_tracing("router", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


@pytest.mark.parametrize("header", [None, "", "00-abc", "00-" + "x" * 32 + "-" + "0" * 16 + "-01", "0" * 4096])
def test_only_a_context_is_taken_for_one(header: str | None) -> None:
    """What callers send is copied into messages to verifiers: only what has the right form."""
    assert checked_traceparent(header) == ""
    good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert checked_traceparent(good) == good
