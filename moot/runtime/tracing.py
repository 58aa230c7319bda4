"""Distributed traces by OpenTelemetry: off, and one comparison, unless the environment names a collector.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) switches them on, as in every program that uses
OpenTelemetry; its other variables (sampler, headers, resource) work as well. The packages are those of the extra
`tracing`. A span is one request's stay in a process; its context travels inside the messages of that request, since a
stream carries many. No prompt, text, token or key is an attribute.

An opt-in record of what a process computes and when: one JSON object a line, in the file MOOT_TRACE_FILE names.

Off, and one look at a variable, unless the environment names a file. A line has `name`, `start_ns` and `end_ns` of
CLOCK_MONOTONIC, which all processes of a machine share, and the facts that the place gives. `{pid}` in the file's name
stands for the process id.
"""

from __future__ import annotations

import contextvars
import importlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, TextIO

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
    """The file, written line by line so that it can be read while the process runs; None without a path."""
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


class Span:
    """A request's stay here. This one records nothing: it stands for all while tracing is off."""

    traceparent = ""
    """For the messages of the request: its context as W3C Trace Context writes it, or nothing."""

    def note(self, **attributes: Value) -> None:
        """Facts for whoever looks at it; names get the prefix `moot.`."""

    def end(self, error: str = "") -> None:
        """Once. `error`: the name of what ended it, if it failed."""


class _Recorded(Span):
    def __init__(self, span: Any, traceparent: str, failed: Any) -> None:
        self._span = span
        self._failed = failed
        self.traceparent = traceparent

    def note(self, **attributes: Value) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(f"moot.{name}", value)

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_status(self._failed, error)
        self._span.end()


class Tracing:
    """Of one process. `begin` may be called from any thread; spans leave by a thread of their own."""

    def begin(self, name: str, parent: str = "", **attributes: Value) -> Span:
        """A span that somebody has to end. `parent`: the context that came with the request."""
        return _NOTHING

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""


class _Exported(Tracing):
    def __init__(self, service: str) -> None:
        trace, sdk, export, otlp, resources, propagation = map(_imported, _MODULES)
        attributes = {"service.name": f"moot-{service}", "service.version": version("moot")}
        self._provider = sdk.TracerProvider(resource=resources.Resource.create(attributes))
        self._provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("moot")
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._in_span = trace.set_span_in_context
        self._failed = trace.StatusCode.ERROR

    def begin(self, name: str, parent: str = "", **attributes: Value) -> Span:
        parents = self._propagator.extract({"traceparent": parent}) if parent else None
        span = self._tracer.start_span(name, context=parents)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._in_span(span))
        recorded = _Recorded(span, carrier.get("traceparent", ""), self._failed)
        recorded.note(**attributes)
        return recorded

    def close(self) -> None:
        self._provider.shutdown()


_NOTHING = Span()
_MODULES = (
    "opentelemetry.trace",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.resources",
    "opentelemetry.trace.propagation.tracecontext",
)


_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(header: str | None) -> str:
    """What a caller sent, if it is one: nothing else goes into our messages."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else ""


def open_tracing(service: str, environ: Mapping[str, str] | None = None) -> Tracing:
    """Whatever the environment says. Raises ConfigError where it names a collector and the packages are missing."""
    environ = os.environ if environ is None else environ
    return _Exported(service) if any(environ.get(name) for name in ENDPOINTS) else Tracing()


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        problem = f"{ENDPOINTS[1]} is set, and OpenTelemetry is not installed: pip install 'moot[tracing]'"
        raise ConfigError(problem) from error
