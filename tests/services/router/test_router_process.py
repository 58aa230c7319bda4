"""The router as a process, or as several: from its flags to its drain, between real clients and scripted peers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from moot.config import load_config
from moot.core.errors import ConfigError
from moot.core.noise import choice_seed
from moot.core.options import make_config
from moot.core.types import SamplingParams
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier, byte_tokenizer
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from services.router.config import RouterConfig
from services.router.lifecycle import serve
from services.router.workers import merged
from tests.waiting import GIVE_UP_S, eventually

TEXT = ScriptedText()
ROUTER = (sys.executable, "-m", "services.router")


@dataclass
class Process:
    process: asyncio.subprocess.Process
    port: int
    grpc_port: int
    metrics_port: int
    verifier: ScriptedVerifier
    client: httpx.AsyncClient

    @property
    def completions(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    async def probe(self, name: str) -> httpx.Response:
        return await self.client.get(f"http://127.0.0.1:{self.metrics_port}/{name}")

    async def metric(self, name: str) -> float:
        text = (await self.probe("metrics")).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def of_each_worker(self, name: str) -> dict[str, float]:
        found = re.findall(rf'^{name}{{worker="(\d)"}} (\S+)$', (await self.probe("metrics")).text, re.M)
        return {worker: float(value) for worker, value in found}

    def workers(self) -> set[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {int(child) for child in path.read_text().split()}

    @asynccontextmanager
    async def terminated(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """SIGTERM while it streams: readiness goes; behind the block the stream comes to its end, and so does it."""
        long = {"prompt": "hello", "max_tokens": 100, "seed": 3, "stream": True}
        async with client.stream("POST", self.completions, json=long) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            self.verifier.freeze()
            self.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GIVE_UP_S):
                while (await self.probe("readyz")).status_code == 200:  # noqa: ASYNC110 - HTTP
                    await asyncio.sleep(0.01)
            yield
            self.verifier.thaw()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(self.process.wait(), GIVE_UP_S) == 0
        await eventually(lambda: self.verifier.num_streams == 0)


@asynccontextmanager
async def router(folder: Path, *flags: str) -> AsyncIterator[Process]:
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    fingerprint = tokenizer_fingerprint(load_tokenizer(folder / "tokenizer"))
    verifier = ScriptedVerifier(TEXT, tokenizer_fingerprint=fingerprint)
    drafter = ScriptedDrafter(TEXT, tokenizer_fingerprint=fingerprint, spoil=0.3)
    ready = folder / "ready.json"
    async with verifier, drafter, httpx.AsyncClient(timeout=GIVE_UP_S) as client:
        process = await asyncio.create_subprocess_exec(
            *(*ROUTER, "--model", str(folder / "tokenizer"), "--ready-file", str(ready)),
            *("--port", "0", "--grpc-port", "0", "--metrics-port", "0", "--served-model-name", "scripted"),
            *("--verifiers", verifier.address, "--drafters", f"scripted={drafter.address}"),
            *("--in-process-drafters", "suffix,prompt_lookup", "--max-missed-heartbeats", "1000", *flags),
            env={key: value for key, value in os.environ.items() if not key.startswith("MOOT_")},
        )
        try:
            await eventually(lambda: ready.exists() or process.returncode is not None)
            assert process.returncode is None, "the router ended at its start"
            facts = json.loads(ready.read_text())
            assert facts.pop("pid") == process.pid
            running = Process(process, **facts, verifier=verifier, client=client)
            async with asyncio.timeout(GIVE_UP_S):
                while (await client.get(f"http://127.0.0.1:{running.port}/readyz")).status_code != 200:  # noqa: ASYNC110 - HTTP
                    await asyncio.sleep(0.02)
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def plain(max_tokens: int) -> tuple[int, ...]:
    return TEXT.plain(b"hello", SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=choice_seed(3, 0)))[0]


async def test_router_process_serves_and_drains(tmp_path: Path) -> None:
    """HTTP and gRPC give the same text; SIGTERM turns readiness off, lets a stream finish and refuses the next one."""
    async with router(tmp_path) as running:
        body = {"prompt": "hello", "max_tokens": 40, "seed": 3, "include_metrics": True}
        answer = (await running.client.post(running.completions, json=body)).json()
        assert answer["usage"]["completion_tokens"] == 40
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
            stub = router_service_pb2_grpc.RouterServiceStub(channel)
            call = stub.Generate(pb.GenerateRequest(prompt="hello", max_tokens=40, seed=3), timeout=GIVE_UP_S)
            parts = [part async for part in call]
        assert tuple(token for part in parts for token in part.token_ids) == plain(40)
        assert "".join(part.text for part in parts) == answer["choices"][0]["text"]
        assert await running.metric("moot_rounds_total") > 0
        assert await running.metric('moot_degraded{mode="no_drafters"}') == 0
        assert await running.metric(f'moot_build_info{{service="router",version="{version("moot")}"}}') == 1
        async with running.terminated(running.client):
            refused = await running.client.post(running.completions, json=body)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers


async def test_workers_share_the_port_and_are_replaced_and_drain(tmp_path: Path) -> None:
    """Both workers serve on one port and give the same text; each one's metrics are told apart; one that dies is
    replaced while the other serves; SIGTERM lets a running stream finish on its worker, and both end."""
    # Every request on a connection of its own, which the system gives to whichever worker.
    anew = httpx.AsyncClient(timeout=GIVE_UP_S, limits=httpx.Limits(max_keepalive_connections=0))
    async with router(tmp_path, "--workers", "2") as running, anew as client:
        body = {"prompt": "hello", "max_tokens": 30, "seed": 3, "return_token_ids": True}
        for _ in range(100):
            answer = (await client.post(running.completions, json=body)).raise_for_status().json()
            assert tuple(answer["choices"][0]["token_ids"]) == plain(30)
            rounds = await running.of_each_worker("moot_rounds_total")
            if min(rounds.values()) > 0:
                break
        assert len(rounds) == 2
        assert min(rounds.values()) > 0, "one worker got all of 100 connections"
        assert (await running.probe("readyz")).status_code == 200

        before = running.workers()
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)
        await eventually(lambda: min(before) not in running.workers())
        assert (await running.probe("livez")).status_code == 200
        async with asyncio.timeout(GIVE_UP_S):
            while len(await running.of_each_worker("moot_rounds_total")) < 2:  # noqa: ASYNC110 - HTTP
                await asyncio.sleep(0.05)
        assert len(running.workers()) == 2
        async with running.terminated(client):
            pass


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], [b"no tokenizer at"]),
        (
            ["--workers", "2", "--port", "0", "--grpc-port", "0", "--metrics-port", "0"],
            [b"no tokenizer at", b"before it served"],
        ),
    ],
    ids=["one process", "workers"],
)
def test_usage_errors_exit_with_two(tmp_path: Path, flags: list[str], words: list[bytes]) -> None:
    """A wrong flag or a missing tokenizer is one sentence and exit status 2; workers that cannot start are not started
    again and again."""
    command = [*ROUTER, "--model", str(tmp_path), "--verifiers", "127.0.0.1:1", *flags]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=GIVE_UP_S, check=False)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)


def test_samples_of_workers_are_told_apart() -> None:
    """Every sample keeps its name and labels and gains the worker's; families of one name are one."""
    text = '# HELP some_total Some.\n# TYPE some_total counter\nsome_total{kind="a"} 2.0\n'
    (family,) = merged({"0": text, "1": text.replace("2.0", "3.0"), "2": ""})
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"kind": "a", "worker": "0"}, 2.0),
        ({"kind": "a", "worker": "1"}, 3.0),
    ]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"port": "taken"}, "cannot listen on"),
        ({"grpc_port": "taken"}, "cannot listen on"),
        ({"metrics_port": "taken"}, "cannot serve metrics"),
        ({"port": 99999}, "0 to 65535"),
        ({"grpc_port": 99999}, "0 to 65535"),
        ({"metrics_port": 99999}, "cannot serve metrics"),
        ({"host": "no.such.host.invalid"}, "no.such.host.invalid"),
        ({"redis_url": "redis://user:canary@host:canary/0"}, "address of the store"),
        ({"redis_url": "off"}, "address of the store"),
        ({"ready_file": Path("/nonexistent/folder/ready")}, "ready file"),
        ({"verifiers": ("nowhere",)}, "host:port"),
        ({"in_process_drafters": ("nosuch",)}, "unknown drafter kind"),
        ({"in_process_drafters": ("suffix",), "drafters": ("suffix=h:1",)}, "both name suffix"),
    ],
    ids=str,
)
async def test_what_a_router_cannot_start_with_is_a_config_error(
    tmp_path: Path, changed: dict[str, Any], word: str
) -> None:
    """One sentence without a secret, whatever is wrong with its ports, files and addresses; and it ends by itself."""
    byte_tokenizer().save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fields = {"port": 0, "grpc_port": 0, "metrics_port": 0, "verifiers": ("127.0.0.1:1",)} | changed
        fields = {name: port if value == "taken" else value for name, value in fields.items()}

        config = make_config(RouterConfig, model=str(tmp_path), **fields)
        with pytest.raises(ConfigError, match=word) as caught:
            await asyncio.wait_for(serve(config, asyncio.Event()), GIVE_UP_S)
        assert "\n" not in str(caught.value)
        assert "canary" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--verifiers", ""], "verifiers"),
        (["--vote", "loudest"], "vote"),
        (["--vote-quorum", "2"], "--vote-quorum must be 0 to 1"),
        (["--vote-soft-deadline-ms", "500"], "vote_soft_deadline_ms"),
        (["--verify-timeout-s", "0"], "--verify-timeout-s must be above 0"),
        (["--eject-s", "nan"], "--eject-s"),
        (["--open-timeout-s", "inf"], "--open-timeout-s"),
        (["--max-body-bytes", "-5"], "--max-body-bytes must be at least 1"),
        (["--keepalive-time-ms", "-1"], "--keepalive-time-ms must be at least 1"),
        (["--max-moves", "-1"], "--max-moves must be at least 0"),
        (["--port", "-1"], "--port must be at least 0"),
    ],
)
def test_router_config_names_what_is_wrong(flags: list[str], word: str) -> None:
    """Values that cannot work are errors that name the option."""
    with pytest.raises(ConfigError, match=word):
        load_config(RouterConfig, ["--model", "m", "--verifiers", "h:1", *flags], {})


def test_router_config_reaches_every_policy() -> None:
    """Each bound stands in the config once and arrives where it acts."""
    argv = ["--model", "some/folder/", "--verifiers", "h:1,h:2", "--vote-hard-deadline-ms", "70", "--max-moves", "5"]
    config = load_config(RouterConfig, argv, {"MOOT_EJECT_S": "7", "MOOT_REDIS_URL": "redis://h:1/0"})
    assert config.http.served_model_names == ("folder",)
    assert config.verifiers == ("h:1", "h:2")
    assert config.collection_policy.hard_deadline_s == 0.07
    assert config.target_policy.max_moves == 5
    assert config.ejection_policy.eject_s == 7
    assert config.store.url == "redis://h:1/0"
