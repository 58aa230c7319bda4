"""The HTTP server: the app under uvicorn, inside an event loop that its caller owns.

`connections` bounds how much waits for a slow reader, and for how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from moot.core.errors import ConfigError
from services.router.api.choices import Front

log = logging.getLogger(__name__)

_NO_LINGER = struct.pack("ii", 1, 0)


def connections(buffer_bytes: int, timeout_s: float, on_slow: Callable[[], None]) -> type[asyncio.Protocol]:
    """The class of a server's connections.

    At most `buffer_bytes` and one event wait in the process for a connection's reader, and `buffer_bytes` unsent in the
    system; then the writer waits. A reader that has not taken three quarters of what filled the buffer (or all that was
    left of a finished answer) within `timeout_s` is cut off: the connection is reset, and `on_slow` called.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, as what is installed says
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=buffer_bytes)
            raw = transport.get_extra_info("socket")
            # Not on every system; without it the send buffer of the system comes on top.
            if raw is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, buffer_bytes)

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unwatch()

        def on_response_complete(self) -> None:
            # What follows may be a request that has come already, and its answer: judged by itself.
            self._unwatch()
            super().on_response_complete()
            if self.transport.get_write_buffer_size() and self._timer is None:
                self._watch()

        def data_received(self, data: bytes) -> None:
            # The next request: from here on what waits is not what is left of a finished answer.
            if not self.flow.write_paused:
                self._unwatch()
            super().data_received(data)

        def _watch(self) -> None:
            self._unwatch()
            size = self.transport.get_write_buffer_size()
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look, size)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _look(self, before: int) -> None:
            """Look how much the reader took: nothing was written since there were `before` bytes, so what is missing
            was read."""
            self._timer = None
            left = self.transport.get_write_buffer_size()
            if not left:
                return
            if before - left >= buffer_bytes * 3 // 4:
                self._watch()
                return
            on_slow()
            log.info("a slow reader is cut off", extra={"num_bytes": left})
            if (raw := self.transport.get_extra_info("socket")) is not None:
                # Reset: else the system goes on offering what it holds to a reader that takes its time.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()

    return Connection


_BACKLOG = 1024
_LAST_WORDS_S = 2
"""For aborted requests to say so and let go, at the very end."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone: the owner of the loop handles them."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


async def serve_http(
    app: Starlette,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    drain_timeout_s: float,
    reuse_port: bool = False,
    on_ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until `stop` is set, then drain: readiness off and new requests 503 while those inside finish.

    `on_ready` gets the bound port (port 0: a free one) once connections are accepted. Requests that have not finished
    after `drain_timeout_s` are ended with Draining. Raises ConfigError when the address cannot be bound.
    """
    listener = bind(host, port, reuse_port=reuse_port)
    bound_port = int(listener.getsockname()[1])
    front: Front = app.state.front
    config = uvicorn.Config(
        app,
        http=connections(
            front.settings.stream_buffer_bytes,
            front.settings.slow_client_timeout_s,
            front.metrics.slow_clients.labels("http").inc,
        ),
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        backlog=_BACKLOG,
    )
    server = _Server(config, lambda: on_ready(bound_port))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        admission = front.admission
        admission.draining = True
        if not await admission.wait_idle(drain_timeout_s):
            admission.aborting.set()
            await admission.wait_idle(_LAST_WORDS_S)
        server.should_exit = True
        await serving
        # uvicorn cancels what is left and does not look back.
        await admission.wait_idle(_LAST_WORDS_S)
    finally:
        stopping.cancel()
        serving.cancel()
        await asyncio.wait((serving, stopping))
        listener.close()


def bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """A socket bound there, which does not listen yet. Raises ConfigError.

    `reuse_port`: other sockets that say so too may be bound to the same address; those that listen share what comes.
    """
    # The system would take a port modulo 65536.
    if not 0 <= port < 65536:
        raise ConfigError(f"cannot listen on {host}:{port}: a port is 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
