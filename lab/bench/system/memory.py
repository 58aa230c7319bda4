"""Whether memory is steady: every process of the whole system over many short, varied requests.

    python -m lab.bench.memory [--requests 2000] [--warm-up 2000] [--concurrency 8] [--model PATH]

Without --model a tiny random model, which makes 2,000 requests a matter of minutes; memory per request does not depend
on the weights. The requests are of nine sorts in turn: greedy, sampled, n > 1, log-probabilities, stop strings,
drafting off and fixed, given up half-way, refused, and answered whole without streaming. Resident (RSS) and
proportional (PSS) set size of each process are read between blocks of requests, with nothing in flight. The slope is
Theil and Sen's. Sizes are settled where its interval reaches down to `bound` bytes a request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.harness.intervals import Interval, theil_sen
from lab.bench.harness.pages import Bench, PageConfig, Table
from lab.bench.harness.streams import Reply, ask
from lab.bench.harness.systems import tiny
from lab.bench.harness.watched import memory_of, metrics_of, process_ids
from moot.commands.common import say
from moot.commands.system import ANY_DRAFTER_SET, System, SystemConfig, running
from moot.config import option, variable_of

BENCH = Bench("memory", __doc__, measures=("services", "moot/rpc", "moot/model"))
HEADER = ("process", "RSS after warm-up, MiB", "RSS at the end, MiB", "bytes per request (95 %)", "bound", "verdict")
SETTLE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Config(SystemConfig, PageConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    drafters: tuple[str, ...] = option(ANY_DRAFTER_SET, help="[id=]kind[:option=value]... each")
    drafter_processes: bool = option(True, help="every drafter as a process of its own, as its pods are on a cluster")
    requests: int = option(2000, help="requests after the warm-up")
    warm_up: int = option(2000, help="requests before the first reading that counts")
    concurrency: int = option(8, help="requests at a time")
    block: int = option(50, help="requests between two readings")
    bound: int = option(256, help="bytes per request that are taken for none")
    finished_ttl_s: float = option(2.0, help="seconds that a finished request's record stays on the store")


def bodies(model: str, index: int) -> tuple[dict[str, Any], int]:
    """The request of this number, and after how many tokens its caller leaves (0: never)."""
    # Few different words: the tokenizer remembers up to 10,000 of them, and would fill that memory all the way.
    words = " ".join(f"{(index * 7919 + place * 104_729) % 499}" for place in range(3 + index * 31 % 40))
    body: dict[str, Any] = {"model": model, "prompt": words, "max_tokens": 4 + index % 13}
    sorts: list[dict[str, Any]] = [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0.9, "seed": index, "top_p": 0.9, "repetition_penalty": 1.1},
        {"n": 3, "temperature": 1.0, "seed": index},
        {"logprobs": 3, "temperature": 0},
        {"stop": ["e", "1 2"], "temperature": 0.7, "seed": index},
        {"num_speculative_tokens": (0, 4)[index // 9 % 2], "temperature": 0},
        {"max_tokens": 64, "ignore_eos": True, "temperature": 0},
        {"temperature": -1},
        {"stream": False, "include_metrics": False, "logit_bias": {"65": 2.0}},
    ]
    sort = index % len(sorts)
    return body | sorts[sort], 2 if sort == 6 else 0


async def block(system: System, model: str, numbers: Sequence[int], concurrency: int) -> Counter[str]:
    """Ask the requests of these numbers; how each came out. Raises RuntimeError for an end that is not its sort's."""
    waiting = list(reversed(numbers))
    seen: Counter[str] = Counter()

    async def one() -> None:
        while waiting:
            body, leave_after = bodies(model, index := waiting.pop())
            reply = await ask(system.url, body, name=f"{index}", leave_after=leave_after, chat=False)
            seen[outcome(reply, body, leave_after)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one())
    return seen


def outcome(reply: Reply, body: dict[str, Any], leave_after: int) -> str:
    if body["temperature" if "temperature" in body else "model"] == -1:
        if reply.status == 400:
            return "refused"
    elif leave_after and reply.pieces and not reply.is_whole:
        return "given up"
    elif reply.status == 200 and reply.is_whole:
        return "whole"
    raise RuntimeError(f"request {reply.name} ended with HTTP {reply.status} {reply.error}")


def wait_idle(system: System) -> None:
    """Until no process holds anything of a request."""
    ports = [child.facts["metrics_port"] for child in (system.verifier, *system.drafters)]
    deadline = time.monotonic() + SETTLE_S
    while held := sum(metrics_of(int(port)).get(("moot_num_sessions", ""), 0.0) for port in ports):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{held:.0f} sessions are still open {SETTLE_S:g} s after the last request")
        time.sleep(0.02)


def measure(system: System, config: Config) -> tuple[dict[str, list[tuple[int, int, int]]], Counter[str]]:
    """(requests so far, RSS, PSS) of each process, from the end of the warm-up on."""
    model = system.client.models()[0]
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in process_ids(system)}
    seen: Counter[str] = Counter()
    total = config.warm_up + config.requests
    for first in range(0, total, config.block):
        system.supervisor.check()
        numbers = range(first, min(first + config.block, total))
        seen += asyncio.run(block(system, model, numbers, config.concurrency))
        wait_idle(system)
        if numbers.stop >= config.warm_up:
            for name, pid in process_ids(system).items():
                found[name].append((numbers.stop, *memory_of(pid)))
        if numbers.stop % (10 * config.block) == 0:
            sizes = ", ".join(f"{name} {memory_of(pid)[0] >> 20}" for name, pid in process_ids(system).items())
            say(f"{numbers.stop}/{total} requests, RSS in MiB: {sizes}")
    return found, seen


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    # As long as they stay by default, ten minutes, a store grows for ten minutes: no sign of a leak, nor of none.
    os.environ[variable_of("store_finished_ttl_s")] = str(config.finished_ttl_s)
    with tempfile.TemporaryDirectory(prefix="moot-") as folder:
        config = tiny(config, Path(folder))
        with running(config, "memory", say) as system:
            found, seen = measure(system, config)
    rows = []
    slopes: dict[str, Interval] = {}
    for name, samples in found.items():
        slope = slopes[name] = theil_sen([one[0] for one in samples], [one[1] for one in samples])
        first, last = samples[0][1] / 2**20, samples[-1][1] / 2**20
        verdict = slope.verdict(at_most=config.bound)
        rows.append((name, f"{first:.1f}", f"{last:.1f}", slope.text(0), f"at most {config.bound}", verdict))
    facts = {
        "model": Path(config.model).name,
        "outcomes": dict(seen),
        "samples_requests_rss_pss": found,
        "slopes_bytes_per_request": {name: (slope.median, slope.low, slope.high) for name, slope in slopes.items()},
    }
    BENCH.publish(config, Table(HEADER, rows), facts, HEADER[3], argv=argv)
    say(f"outcomes: {dict(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
