"""Router processes for measurements of the router alone: started, put to work, and what they cost."""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import httpx

from lab.bench.harness.pages import COMMANDS
from moot.commands import embedded_store
from moot.runtime.supervisor import Child, Supervisor
from moot.testing.byte_tokenizer import byte_tokenizer
from moot.tokenizer import tokenizer_fingerprint

START_TIMEOUT_S = 60.0
MODEL = "scripted"
"""The name under which a router serves."""


def start_router(supervisor: Supervisor, verifiers: str, drafters: str, flags: Sequence[str]) -> Child:
    """A router, ready, on free ports. `verifiers`, `drafters`: as its flags of these names take them."""
    own = ("--served-model-name", MODEL, "--port", "0", "--grpc-port", "0", "--metrics-port", "0")
    peers = ("--verifiers", verifiers, "--drafters", drafters)
    router = supervisor.service("router", "router", [*own, *peers, "--log-level", "warning", *flags])
    supervisor.wait_ready([router], START_TIMEOUT_S)
    wait_serving(router)
    return router


def wait_serving(router: Child) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{router.port}/readyz", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def module(name: str, flags: Sequence[str]) -> list[str]:
    """The command of a process of ours that writes a ready file."""
    return [sys.executable, "-m", f"{COMMANDS}.processes.{name}", *flags, "--ready-file", "{ready_file}"]


def scripted_peers(supervisor: Supervisor, folder: Path, flags: Sequence[str]) -> Child:
    """A process of scripted peers, not waited for, and the tokenizer that they have, in `folder`."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    known = ["--fingerprint", tokenizer_fingerprint(tokenizer)]
    return supervisor.spawn("peers", module("scripted_peers", [*known, *flags]))


def scripted_system(
    supervisor: Supervisor, folder: Path, num_drafters: int, step_ms: float = 0.0, more_flags: Sequence[str] = ()
) -> Child:
    """A real router, ready, before scripted peers and a store. `more_flags`: of the router."""
    peers = scripted_peers(supervisor, folder, ["--drafters", str(num_drafters), "--step-ms", str(step_ms)])
    store = supervisor.spawn("store", embedded_store.store_argv(folder), look=lambda: embedded_store.is_ready(folder))
    supervisor.wait_ready([peers, store], START_TIMEOUT_S)
    drafters = ",".join(f"d{index}={address}" for index, address in enumerate(peers.facts["drafters"]))
    flags = ["--model", str(folder / "tokenizer"), "--redis-url", embedded_store.store_url(folder), *more_flags]
    return start_router(supervisor, peers.facts["verifier"], drafters, flags)


async def load(url: str, concurrency: int, tokens: int) -> None:
    """`concurrency` streams at once, each `tokens` long."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(index: int) -> None:
            body = {
                "model": MODEL,
                "prompt": f"request {index} " * 10,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "num_speculative_tokens": 4,
            }
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                last = ""
                async for chunk in response.aiter_raw():
                    last = chunk[-20:].decode(errors="replace")
                if "[DONE]" not in last:
                    raise RuntimeError("a stream broke off")

        await asyncio.gather(*(one(index) for index in range(concurrency)))
