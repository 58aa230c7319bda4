"""Running the app with uvicorn inside an event loop that belongs to somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from moot.core.errors import ConfigError
from services.router.http.connections import connections
from services.router.http.endpoint import Front

_BACKLOG = 1024
_LAST_WORDS_S = 2
"""For aborted requests to say so and let go, at the very end."""


class _Server(uvicorn.Server):
    """Leaves the process's signals alone: whoever runs the loop handles them."""

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
        admission.drain()
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
