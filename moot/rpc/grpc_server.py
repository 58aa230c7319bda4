"""A gRPC server's life: bind, health, metrics port, ready file, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from moot.core.errors import ConfigError
from moot.rpc.interceptors import ErrorInterceptor
from moot.rpc.link import LinkConfig
from moot.rpc.tls import PodTls
from moot.runtime.admin import AdminServer
from moot.runtime.metrics import Metrics
from moot.runtime.process import PeerOptions

_log = logging.getLogger("moot.server")


def write_ready_file(path: Path | None, **facts: object) -> None:
    """Write where this process listens to the ready file, whole or not at all, for the process that started it. Raises
    ConfigError."""
    if path is None:
        return
    temporary = path.with_name(path.name + f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps({**facts, "pid": os.getpid()}))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the ready file {path}: {error.strerror or error}") from error


def termination_event() -> asyncio.Event:
    """An event that is set on the first SIGTERM or SIGINT of this process. Needs a running loop in the main thread."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


class GrpcServer:
    """One server with the health service beside its own; `port` is the bound one."""

    def __init__(
        self, link: LinkConfig, services: Sequence[str], reuse_port: bool = False, tls: PodTls | None = None
    ) -> None:
        """With `tls` only routers of the same installation may call, and its files are watched while it serves."""
        self._services = ("", *services)
        self._tls = tls
        self._health = health.aio.HealthServicer()
        interceptor = ErrorInterceptor() if tls is None else ErrorInterceptor(partial(tls.admit, "router"))
        self.server = grpc.aio.server(options=link.server_options(reuse_port), interceptors=(interceptor,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Raises ConfigError when the address cannot be bound."""
        # gRPC would take a port modulo 65536.
        if not 0 <= port < 65536:
            raise ConfigError(f"cannot listen on {host}:{port}: a port is 0 to 65535")
        try:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if self._tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: no such address here, or the port is taken") from error
        await self.server.start()
        if self._tls is not None:
            self._tls.watch()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, cut the rest after `grace_s` seconds."""
        await self.server.stop(grace_s)
        if self._tls is not None:
            self._tls.close()


async def run_until_terminated(
    server: GrpcServer,
    metrics: Metrics,
    options: PeerOptions,
    *,
    drain: Callable[[], Awaitable[None]],
    alive: Callable[[], bool] = lambda: True,
    terminated: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM; then: not ready, `drain()` (at most `options.drain_grace_s` seconds), stop.

    `drain` tells the peers to move and waits for what runs. The admin port answers from the start to the end.
    """
    terminated = terminated or termination_event()
    serving = False
    admin = AdminServer(metrics.registry, options, alive=alive, ready=lambda: serving)
    try:
        await server.start(options.host, options.port)
        await server.set_serving(True)
        serving = True
        write_ready_file(options.ready_file, port=server.port, metrics_port=admin.port)
        _log.info("serving", extra={"port": server.port, "metrics_port": admin.port})
        await terminated.wait()
        _log.info("draining", extra={"grace_s": options.drain_grace_s})
        serving = False
        await server.set_serving(False)
        try:
            async with asyncio.timeout(options.drain_grace_s):
                await drain()
        except TimeoutError:
            _log.warning("drain grace is over", extra={"grace_s": options.drain_grace_s})
        await server.stop(grace_s=1.0)
    finally:
        admin.close()
