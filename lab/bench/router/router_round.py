"""What a round costs the router: CPU per round, and the time a round takes when its peers cost almost nothing.

    python -m lab.bench.router_round [--concurrency 1,16,64] [--tokens 256] [--drafters 3] [--step-ms 0]

The router is the real process with everything on: HTTP with SSE, a record of every request on a Redis-like server, one
remote verifier and three remote drafters, scripted, in a process of their own. CPU is the router's user and system
time over the rounds that its metrics count. Draft and verify stage are what a round waits for, the scripted peers' own
work (plain Python) included. A turn is the router's own part of that: from the last proposal read until the draft is
written, and from the answer read until the next questions are written, as its metric moot_round_turn_seconds has it
(written: gRPC has put it on the connection); medians are taken inside its buckets, which are a fifth apart.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.harness.arms import Arm, Column, Figures, Runs, in_turns, table_of
from lab.bench.harness.pages import Bench, BenchConfig
from lab.bench.harness.scripted import load, scripted_system
from lab.bench.harness.watched import cpu_seconds, gained, median_of, scrape
from moot.config import option
from moot.runtime.supervisor import Child, Supervisor

BENCH = Bench("router_round", __doc__, measures=("services/router", "moot/core", "moot/rpc"))
COLUMNS = (
    Column("router CPU us per round", "cpu_us_per_round", 0),
    Column("last proposal read to draft written, ms", "turn_verify_ms"),
    Column("answer read to questions written, ms", "turn_propose_ms"),
    Column("both turns, ms", "turns_ms"),
)


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    concurrency: tuple[int, ...] = option((1, 16, 64), help="requests at once")
    tokens: int = option(256, help="tokens of each answer")
    drafters: int = option(3, help="scripted drafters")
    step_ms: float = option(0.0, help="milliseconds of a verify step; 0: next to none")


def measure(router: Child, concurrency: int, tokens: int) -> Figures:
    before, cpu_before = scrape(router.facts["metrics_port"]), cpu_seconds(router.process.pid)
    begin = time.perf_counter()
    asyncio.run(load(f"http://127.0.0.1:{router.port}", concurrency, tokens))
    wall = time.perf_counter() - begin
    after, cpu_after = scrape(router.facts["metrics_port"]), cpu_seconds(router.process.pid)
    rounds = gained(before, after, "moot_rounds_total")
    found = {"cpu_us_per_round": 1e6 * (cpu_after - cpu_before) / rounds, "rounds": rounds, "wall_s": wall}
    for stage in ("draft", "verify"):
        found[f"{stage}_ms"] = 1e3 * gained(before, after, "moot_round_duration_seconds_sum", stage) / rounds
    for stage in ("verify", "propose"):
        found[f"turn_{stage}_ms"] = 1e3 * median_of(before, after, "moot_round_turn_seconds", stage)
    found["turns_ms"] = found["turn_verify_ms"] + found["turn_propose_ms"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    arms = [Arm(str(count), {"concurrency": count}) for count in config.concurrency]
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        router = scripted_system(supervisor, Path(name), config.drafters, config.step_ms)
        asyncio.run(load(f"http://127.0.0.1:{router.port}", 8, config.tokens))
        runs = Runs(
            in_turns(
                arms,
                lambda arm: measure(router, arm.differs["concurrency"], config.tokens),
                config.repetitions,
                warm_up=0,
            )
        )
    facts = {"runs": runs.of, "tokens": config.tokens, "drafters": config.drafters, "step_ms": config.step_ms}
    table = table_of(runs, "concurrency", COLUMNS)
    BENCH.publish(config, table, facts, COLUMNS[0].title, argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
