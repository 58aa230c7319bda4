"""A collector of traces: what OpenTelemetry's exporter sends by HTTP, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.observability.needed_tools import module

messages = module("opentelemetry.proto.collector.trace.v1.trace_service_pb2", "opentelemetry-proto")


@dataclass(frozen=True, slots=True)
class Seen:
    """`facts`: attributes without their prefix."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    is_error: bool
    facts: dict[str, Any]


class Collector:
    """Listens on loopback while it is entered. `raw`: all bodies, one after the other."""

    def __enter__(self) -> Self:
        self.raw = b""
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """The spans are what is looked at."""

        self._spans: list[Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def spans(self, trace_id: str = "") -> list[Seen]:
        """Of one trace, or all."""
        with self._lock:
            return [span for span in self._spans if trace_id in ("", span.trace_id)]

    def _take(self, body: bytes) -> None:
        request = messages.ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.raw += body
            for resource in request.resource_spans:
                (service,) = [
                    one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
                ]
                self._spans += [_seen(service, span) for scope in resource.scope_spans for span in scope.spans]


def _seen(service: str, span: Any) -> Seen:
    facts = {one.key.removeprefix("moot."): _value(one.value) for one in span.attributes}
    is_error = span.status.code == span.status.STATUS_CODE_ERROR
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    return Seen(service, span.name, *ids, is_error, facts)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
