"""What a round costs the router: CPU per round, and the time a round takes when its peers cost almost nothing.

    python -m bench.router_round [--concurrency 1 64] [--tokens 256] [--repetitions 5] [--drafters 3]

The router is the real process with everything on: HTTP with SSE, a record of every request on a Redis-like server, one
remote verifier and three remote drafters, scripted, in a process of their own. CPU is the router's user and system
time over the rounds that its metrics count; the time of a round is what one request alone takes per round, the
scripted peers' own work (plain Python, a few tenths of a millisecond) included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.report import publish, spread
from moot import embedded_store
from moot.supervisor import Child, Supervisor
from moot.testing.tokenizer import byte_tokenizer
from moot.tokenizer import tokenizer_fingerprint

START_TIMEOUT_S = 60.0
STAGES = ("draft", "verify")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def samples(port: int) -> dict[str, float]:
    """Every sample of the router's metrics by its name, labels of `stage` appended."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name + sample.labels.get("stage", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels and set(sample.labels) <= {"stage"}
    }


async def load(url: str, concurrency: int, tokens: int) -> None:
    """`concurrency` streams at once, each `tokens` long."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(index: int) -> None:
            body = {
                "model": "scripted",
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


def measure(router: Child, concurrency: int, tokens: int) -> dict[str, float]:
    before, cpu_before = samples(router.facts["metrics_port"]), cpu_seconds(router.process.pid)
    begin = time.perf_counter()
    asyncio.run(load(f"http://127.0.0.1:{router.port}", concurrency, tokens))
    wall = time.perf_counter() - begin
    after, cpu_after = samples(router.facts["metrics_port"]), cpu_seconds(router.process.pid)
    rounds = after["moot_rounds_total"] - before["moot_rounds_total"]
    found = {"cpu_us_per_round": 1e6 * (cpu_after - cpu_before) / rounds, "rounds": rounds, "wall_s": wall}
    for stage in STAGES:
        name = f"moot_round_duration_seconds_sum{stage}"
        found[f"{stage}_ms"] = 1e3 * (after[name] - before.get(name, 0.0)) / rounds
    return found


def scripted_system(supervisor: Supervisor, folder: Path, num_drafters: int) -> Child:
    """A real router, ready, before scripted peers and a store."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    flags = ["--fingerprint", tokenizer_fingerprint(tokenizer), "--drafters", str(num_drafters)]
    peers = supervisor.spawn(
        "peers", [sys.executable, "-m", "bench.scripted_peers", *flags, "--ready-file", "{ready_file}"]
    )
    store = supervisor.spawn("store", embedded_store.store_argv(folder), look=lambda: embedded_store.is_ready(folder))
    supervisor.wait_ready([peers, store], START_TIMEOUT_S)
    drafters = ",".join(f"d{index}={address}" for index, address in enumerate(peers.facts["drafters"]))
    router = supervisor.service(
        "router",
        "router",
        [
            *("--model", str(folder / "tokenizer"), "--served-model-name", "scripted", "--port", "0"),
            *("--grpc-port", "0", "--metrics-port", "0", "--verifiers", peers.facts["verifier"]),
            *("--drafters", drafters, "--redis-url", embedded_store.store_url(folder), "--log-level", "warning"),
        ],
    )
    supervisor.wait_ready([router], START_TIMEOUT_S)
    wait_serving(router)
    return router


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--drafters", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {concurrency: [] for concurrency in arguments.concurrency}
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        router = scripted_system(supervisor, Path(name), arguments.drafters)
        asyncio.run(load(f"http://127.0.0.1:{router.port}", 8, arguments.tokens))
        for _ in range(arguments.repetitions):
            for concurrency in arguments.concurrency:
                found[concurrency].append(measure(router, concurrency, arguments.tokens))
    rows = []
    for concurrency, runs in found.items():
        cell: dict[str, Any] = {key: spread([run[key] for run in runs]) for key in runs[0]}
        text = {key: f"{middle:.2f} ({low:.2f} to {high:.2f})" for key, (middle, low, high) in cell.items()}
        middle, low, high = cell["cpu_us_per_round"]
        rows.append(
            (
                concurrency,
                f"{middle:.0f} ({low:.0f} to {high:.0f})",
                text["draft_ms"],
                text["verify_ms"],
            )
        )
    publish(
        "router_round",
        ("concurrency", "router CPU us per round", "draft ms", "verify ms"),
        rows,
        {"runs": found, "tokens": arguments.tokens, "drafters": arguments.drafters},
    )


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


if __name__ == "__main__":
    main()
