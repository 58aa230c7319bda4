"""A router of several processes, between real clients and scripted peers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from moot.core.noise import choice_seed
from moot.core.types import SamplingParams
from services.router.workers import merged
from tests.services.router.test_router_process import TEXT, Process, router, until_not_ready
from tests.waiting import GIVE_UP_S, eventually


async def _text(client: httpx.AsyncClient, running: Process) -> list[int]:
    """One request on a connection of its own, which the system gives to whichever worker."""
    body = {"prompt": "hello", "max_tokens": 30, "seed": 3, "return_token_ids": True}
    answer = await client.post(f"http://127.0.0.1:{running.port}/v1/completions", json=body)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


async def _by_worker(running: Process, name: str) -> dict[str, float]:
    text = (await running.client.get(f"http://127.0.0.1:{running.metrics_port}/metrics")).text
    return {worker: float(value) for worker, value in re.findall(rf'^{name}{{worker="(\d)"}} (\S+)$', text, re.M)}


def _children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_workers_share_the_port_and_are_replaced_and_drain(tmp_path: Path) -> None:
    """Both workers serve on one port and give the same text; each one's metrics are told apart; one that dies is
    replaced while the other serves; SIGTERM lets a running stream finish on its worker, and both end."""

    async def main() -> None:
        async with router(tmp_path, "--workers", "2") as running:
            params = SamplingParams(temperature=1.0, max_tokens=30, seed=choice_seed(3, 0))
            expected = list(TEXT.plain(b"hello", params)[0])
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(timeout=GIVE_UP_S, limits=limits) as client:
                for _ in range(100):
                    assert await _text(client, running) == expected
                    if min((await _by_worker(running, "moot_rounds_total")).values()) > 0:
                        break
                rounds = await _by_worker(running, "moot_rounds_total")
                assert len(rounds) == 2
                assert min(rounds.values()) > 0, "one worker got all of 100 connections"
                probe = f"http://127.0.0.1:{running.metrics_port}"
                assert (await client.get(f"{probe}/readyz")).status_code == 200

                before = _children(running.process.pid)
                assert len(before) == 2
                os.kill(min(before), signal.SIGKILL)
                await eventually(lambda: min(before) not in _children(running.process.pid))
                assert (await client.get(f"{probe}/livez")).status_code == 200
                async with asyncio.timeout(GIVE_UP_S):
                    while len(await _by_worker(running, "moot_rounds_total")) < 2:  # noqa: ASYNC110 - HTTP
                        await asyncio.sleep(0.05)
                assert len(_children(running.process.pid)) == 2

                long = {"prompt": "hello", "max_tokens": 60, "seed": 3, "stream": True}
                url = f"http://127.0.0.1:{running.port}/v1/completions"
                async with client.stream("POST", url, json=long) as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    running.verifier.freeze()
                    running.process.send_signal(signal.SIGTERM)
                    await until_not_ready(running)
                    running.verifier.thaw()
                    rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
                assert await asyncio.wait_for(running.process.wait(), GIVE_UP_S) == 0
                await eventually(lambda: running.verifier.num_streams == 0)

    asyncio.run(main())


def test_what_no_worker_can_start_with_ends_all(tmp_path: Path) -> None:
    """Workers that cannot start are not started again and again: the parent ends with status 2, and says why."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.router", "--model", str(tmp_path), "--verifiers", "127.0.0.1:1"),
            *("--workers", "2", "--port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        ],
        stderr=subprocess.PIPE,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert done.returncode == 2
    assert b"no tokenizer at" in done.stderr
    assert b"before it served" in done.stderr


def test_samples_of_workers_are_told_apart() -> None:
    """Every sample keeps its name and labels and gains the worker's; families of one name are one."""
    text = '# HELP some_total Some.\n# TYPE some_total counter\nsome_total{kind="a"} 2.0\n'
    (family,) = merged({"0": text, "1": text.replace("2.0", "3.0"), "2": ""})
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"kind": "a", "worker": "0"}, 2.0),
        ({"kind": "a", "worker": "1"}, 3.0),
    ]
