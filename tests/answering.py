"""An HTTP server on a free loopback port, whose answers a test writes."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """`path`: with its query; `headers`: by lower-case name."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """`body`: whole, or parts that are sent as they come and end with the connection. They are closed when the caller
    hangs up."""

    body: bytes | Generator[bytes, None, None] = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def answering(answer: Callable[[Request], Answer], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The server's URL. Requests are answered in threads of their own, connections are kept between whole answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def respond(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            made = answer(Request(self.command, self.path, headers, sent))
            whole = {"Content-Length": str(len(made.body))} if isinstance(made.body, bytes) else {"Connection": "close"}
            parts = made.body if not isinstance(made.body, bytes) else (part for part in [made.body])
            # A caller that hangs up is no news here: the parts are told.
            with suppress(OSError), closing(parts):
                self.send_response(made.status)
                for name, value in {**made.headers, **whole}.items():
                    self.send_header(name, value)
                self.end_headers()
                for part in parts if self.command != "HEAD" else ():
                    self.wfile.write(part)

        do_HEAD = do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}" if tls else f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
