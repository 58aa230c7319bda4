"""A gRPC server inside the test's own process, on loopback, that can be killed and come back on its port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import grpc.aio

from moot.rpc.interceptors import ErrorInterceptor
from moot.rpc.link import LinkConfig


class InProcessServer:
    """A gRPC server on loopback. `add`: registers the servicers, called anew at every start. An async context
    manager."""

    def __init__(self, add: Callable[[grpc.aio.Server], None], link: LinkConfig | None = None) -> None:
        self._add = add
        self._link = link or LinkConfig()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        server = grpc.aio.server(options=self._link.server_options(), interceptors=(ErrorInterceptor(),))
        self._add(server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def kill(self) -> None:
        """Die as a process does: every stream breaks at once."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()
