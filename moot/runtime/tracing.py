"""Traces of a process: distributed ones by OpenTelemetry, and a record of what it computes and when, in a file.

Both are off unless the environment names where they go; the API of OpenTelemetry then records nothing, and the record
costs one look at a variable. `OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) names a collector,
as in every program that uses OpenTelemetry; its other variables (sampler, headers, resource) work as well. What records
and sends is the extra `tracing`. A span is one request's stay in a process; its context travels inside the messages of
that request, since a stream carries many. No prompt, text, token or key is an attribute.

MOOT_TRACE_FILE names the file of the record, one JSON object a line. A line has `name`, `start_ns` and `end_ns` of
CLOCK_MONOTONIC, which all processes of a machine share, and the facts that the place gives. `{pid}` in the file's name
stands for the process id.
"""

from __future__ import annotations

import contextvars
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import TextIO

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moot.core.errors import ConfigError


class _Span:
    __slots__ = ("_facts", "_name", "_output", "_start_ns")

    def __init__(self, output: TextIO, name: str, facts: dict[str, int]) -> None:
        self._output, self._name, self._facts = output, name, facts

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *exc_info: object) -> None:
        times = {"name": self._name, "start_ns": self._start_ns, "end_ns": time.monotonic_ns()}
        self._output.write(json.dumps(times | self._facts) + "\n")


def open_trace(path: str) -> TextIO | None:
    """The file of the record, written line by line so that it can be read while the process runs; None without a
    path."""
    return open(path.replace("{pid}", str(os.getpid())), "a", buffering=1) if path else None


_output = open_trace(os.environ.get("MOOT_TRACE_FILE", ""))
_NO_EVENT: AbstractContextManager[None] = nullcontext()


def span(name: str, **facts: int) -> AbstractContextManager[None]:
    """Records how long the body takes, also when it raises."""
    return _NO_EVENT if _output is None else _Span(_output, name, facts)


Value = str | int | float | bool

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

traceparent_var: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")
"""Where the trace of this task's request goes on: the caller's context at first, then that of our own span."""


_PROPAGATOR = TraceContextTextMapPropagator()


class Span:
    """A request's stay in this process. While tracing is off it records nothing, and stands for its caller's."""

    def __init__(self, span: trace.Span = trace.INVALID_SPAN) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """The context for the messages of the request, as W3C Trace Context writes it, or nothing."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get("traceparent", "")

    def note(self, **attributes: Value) -> None:
        """Add facts to the span; names get the prefix `moot.`."""
        if self._span.is_recording():
            self._span.set_attributes({f"moot.{name}": value for name, value in attributes.items()})

    def end(self, error: str = "") -> None:
        """End the span; called once. `error`: the name of what ended it, if it failed."""
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class Tracing:
    """The distributed traces of one process. `begin` may be called from any thread; spans leave by a thread of their
    own.

    `close`: sends what is left, for at most a few seconds.
    """

    def __init__(self, tracer: trace.Tracer | None = None, close: Callable[[], None] = lambda: None) -> None:
        self._tracer = tracer or trace.NoOpTracer()
        self.close = close

    def begin(self, name: str, parent: str = "", **attributes: Value) -> Span:
        """A span that the caller has to end. `parent`: the context that came with the request."""
        context = _PROPAGATOR.extract({"traceparent": parent}, Context()) if parent else Context()
        span = Span(self._tracer.start_span(name, context))
        span.note(**attributes)
        return span


_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(header: str | None) -> str:
    """The `traceparent` that a caller sent, if it is one: nothing else goes into our messages."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else ""


def open_tracing(service: str, environ: Mapping[str, str] | None = None) -> Tracing:
    """Tracing as the environment asks for it. Raises ConfigError where it names a collector and the packages are
    missing."""
    environ = os.environ if environ is None else environ
    if not any(environ.get(name) for name in ENDPOINTS):
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        problem = f"{ENDPOINTS[1]} is set, and OpenTelemetry is not installed: pip install 'moot[tracing]'"
        raise ConfigError(problem) from error
    resource = Resource.create({"service.name": f"moot-{service}", "service.version": version("moot")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer("moot"), provider.shutdown)
