"""The admin port of a process: metrics and probes, for operators and kubelets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from moot.core.errors import ConfigError
from moot.runtime.process import ServiceOptions


class _QuietHandler(WSGIRequestHandler):
    timeout = 5.0  # seconds for a client to send its request

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds is no news."""


def _server_class(host: str) -> type[WSGIServer]:
    """The server class for the family of `host`, an address or a name; a name that has both kinds of address means
    IPv4.

    Raises OSError when it has none.
    """
    addresses = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family for family, *_ in addresses}

    class Server(WSGIServer):
        address_family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6

    return Server


class AdminServer:
    """GET /metrics, /livez, /readyz on `metrics_port`, in a thread of its own: it answers when the loop is stuck.

    `alive` and `ready` are called from that thread. `port` is the bound one when 0 was asked for. Raises ConfigError
    when the address cannot be bound.
    """

    def __init__(
        self,
        metrics: Collector,
        options: ServiceOptions,
        *,
        alive: Callable[[], bool] = lambda: True,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        def app(environ: dict[str, str], start_response: Callable[..., object]) -> list[bytes]:
            path = environ.get("PATH_INFO", "")
            if path == "/metrics":
                start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
                return [generate_latest(metrics)]
            checks = {"/livez": alive, "/readyz": ready}
            if path not in checks:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"not found\n"]
            good = checks[path]()
            start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"ok\n" if good else b"no\n"]

        host, port = options.host, options.metrics_port
        try:
            self._server: WSGIServer = make_server(host, port, app, _server_class(host), _QuietHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
