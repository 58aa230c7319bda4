"""What a round costs the router: CPU per round, and the time a round takes when its peers cost almost nothing.

    python -m bench.router_round [--concurrency 1 16 64] [--tokens 256] [--repetitions 7] [--drafters 3] [--step-ms 0]

The router is the real process with everything on: HTTP with SSE, a record of every request on a Redis-like server, one
remote verifier and three remote drafters, scripted, in a process of their own. CPU is the router's user and system
time over the rounds that its metrics count. Draft and verify stage are what a round waits for, the scripted peers' own
work (plain Python) included. A turn is the router's own part of that: from the last proposal read until the draft is
written, and from the answer read until the next questions are written, as its metric moot_round_turn_seconds has it
(written: gRPC has put it on the connection); medians are taken inside its buckets, which are a fifth apart.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.bench.driving.routers import cpu_seconds, load, scripted_system
from lab.bench.driving.watched import gained, median_of, scrape
from lab.bench.intervals import Interval
from lab.bench.report import publish
from moot.runtime.supervisor import Child, Supervisor

STAGES = ("draft", "verify")
TURNS = ("verify", "propose")


def measure(router: Child, concurrency: int, tokens: int) -> dict[str, float]:
    before, cpu_before = scrape(router.facts["metrics_port"]), cpu_seconds(router.process.pid)
    begin = time.perf_counter()
    asyncio.run(load(f"http://127.0.0.1:{router.port}", concurrency, tokens))
    wall = time.perf_counter() - begin
    after, cpu_after = scrape(router.facts["metrics_port"]), cpu_seconds(router.process.pid)
    rounds = gained(before, after, "moot_rounds_total")
    found = {"cpu_us_per_round": 1e6 * (cpu_after - cpu_before) / rounds, "rounds": rounds, "wall_s": wall}
    for stage in STAGES:
        found[f"{stage}_ms"] = 1e3 * gained(before, after, "moot_round_duration_seconds_sum", stage) / rounds
    for stage in TURNS:
        found[f"turn_{stage}_ms"] = 1e3 * median_of(before, after, "moot_round_turn_seconds", stage)
    found["turns_ms"] = sum(found[f"turn_{stage}_ms"] for stage in TURNS)
    return found


COLUMNS = {
    "router CPU us per round": ("cpu_us_per_round", 0),
    "last proposal read to draft written, ms": ("turn_verify_ms", 2),
    "answer read to questions written, ms": ("turn_propose_ms", 2),
    "both turns, ms": ("turns_ms", 2),
    "draft stage, ms": ("draft_ms", 2),
    "verify stage, ms": ("verify_ms", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds of a verify step; 0: next to none")
    arguments = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {concurrency: [] for concurrency in arguments.concurrency}
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        router = scripted_system(supervisor, Path(name), arguments.drafters, arguments.step_ms)
        asyncio.run(load(f"http://127.0.0.1:{router.port}", 8, arguments.tokens))
        for index in range(arguments.repetitions):
            for concurrency in arguments.concurrency:
                found[concurrency].append(measure(router, concurrency, arguments.tokens))
            print(f"repetition {index + 1} of {arguments.repetitions}", flush=True)
    rows = [
        [concurrency, *(Interval.of([run[key] for run in runs]).text(digits) for key, digits in COLUMNS.values())]
        for concurrency, runs in found.items()
    ]
    publish(
        "router_round",
        ("concurrency", *COLUMNS),
        rows,
        {"runs": found, "tokens": arguments.tokens, "drafters": arguments.drafters, "step_ms": arguments.step_ms},
        lambda figure: draw(figure, found),
    )


def draw(figure: Any, found: dict[int, list[dict[str, float]]]) -> None:
    labels = [str(concurrency) for concurrency in found]
    for place, key, title, bound in (
        (121, "cpu_us_per_round", "router CPU per round, us", 250.0),
        (122, "turns_ms", "both turns, ms (medians)", 0.8),
    ):
        axes = figure.add_subplot(place)
        axes.boxplot([[run[key] for run in runs] for runs in found.values()], tick_labels=labels)
        axes.axhline(bound, linestyle=":", color="grey")
        axes.set(title=title, xlabel="requests at once")
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
