"""One router process against several behind one port: CPU per round, and rounds per second, in turns.

    python -m lab.bench.router_scaling [--workers 2] [--concurrency 64] [--tokens 256] [--repetitions 7]

Both are the real thing before scripted peers and a record store of their own, as in bench.router_round; the workers of
one router share theirs. That scaling holds is read from the router's CPU per round, which several processes must not
raise: rounds per CPU second times the cores that the routers may have is what they serve. Rounds per second are those
of this machine, where peers, store and load take cores from the routers.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.bench.harness.arms import Arm, Column, Figures, Runs, in_turns, table_of
from lab.bench.harness.pages import Bench, BenchConfig, Table
from lab.bench.harness.scripted import load, scripted_system
from lab.bench.harness.watched import cpu_seconds
from moot.config import option
from moot.runtime.supervisor import Child, Supervisor

BENCH = Bench("router_scaling", __doc__, measures=("services/router",))
_ROUNDS = re.compile(r'^moot_rounds_total(?:{worker="(\d+)"})? (\S+)$', re.MULTILINE)
COLUMNS = (
    Column("router CPU us per round", "cpu_us_per_round", 0),
    Column("rounds per second here", "rounds_per_s", 0),
    Column("cores that the routers had", "router_cores"),
    Column("share of the busiest process", "busiest_share"),
)


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    workers: int = option(2, help="router processes behind one port")
    concurrency: int = option(64, help="requests at once")
    tokens: int = option(256, help="tokens of each answer")


def processes(router: Child) -> list[int]:
    """The processes that serve: the workers, or the router itself."""
    pid = router.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] or [pid]


def rounds_of(router: Child) -> dict[str, float]:
    """By worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{router.facts['metrics_port']}/metrics", timeout=10) as answer:
        return {worker: float(value) for worker, value in _ROUNDS.findall(answer.read().decode())}


def measure(router: Child, concurrency: int, tokens: int) -> Figures:
    pids = processes(router)
    before, cpu_before = rounds_of(router), sum(map(cpu_seconds, pids))
    begin = time.perf_counter()
    asyncio.run(load(f"http://127.0.0.1:{router.port}", concurrency, tokens))
    wall = time.perf_counter() - begin
    after, cpu = rounds_of(router), sum(map(cpu_seconds, pids)) - cpu_before
    gained = [after[worker] - before.get(worker, 0.0) for worker in after]
    rounds = sum(gained)
    return {
        "cpu_us_per_round": 1e6 * cpu / rounds,
        "rounds_per_cpu_s": rounds / cpu,
        "rounds_per_s": rounds / wall,
        "router_cores": cpu / wall,
        "busiest_share": max(gained) / rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    arms = [Arm(str(count), {"workers": count}) for count in (1, config.workers)]
    with ExitStack() as stack:
        routers: dict[str, Child] = {}
        for arm in arms:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moot-")))
            supervisor = stack.enter_context(Supervisor(folder))
            routers[arm.name] = scripted_system(supervisor, folder, 3, more_flags=("--workers", arm.name))
            asyncio.run(load(f"http://127.0.0.1:{routers[arm.name].port}", 32, config.tokens))
        runs = Runs(
            in_turns(
                arms,
                lambda arm: measure(routers[arm.name], config.concurrency, config.tokens),
                config.repetitions,
                warm_up=0,
            )
        )
    found = table_of(runs, "router processes", COLUMNS)
    one, several = (arm.name for arm in arms)
    ratios = [runs.ratio(several, one, column.key).text() for column in COLUMNS[:-1]]
    table = Table(found.header, [*found.rows, ["ratio", *ratios, ""]])
    facts = {"runs": runs.of, "concurrency": config.concurrency, "tokens": config.tokens}
    BENCH.publish(config, table, facts, "rounds per second here", argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
