"""One router process against several behind one port: CPU per round, and rounds per second, in turns.

    python -m bench.router_scaling [--workers 2] [--concurrency 64] [--tokens 256] [--repetitions 7]

Both are the real thing before scripted peers and a record store of their own, as in bench.router_round; the workers of
one router share theirs. That scaling holds is read from the router's CPU per round, which several processes must not
raise: rounds per CPU second times the cores that the routers may have is what they serve. Rounds per second are those
of this machine, where peers, store and load take cores from the routers.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lab.bench.driving.routers import cpu_seconds, load, scripted_system
from lab.bench.intervals import Interval, ratios
from lab.bench.report import publish
from moot.runtime.supervisor import Child, Supervisor

_ROUNDS = re.compile(r'^moot_rounds_total(?:{worker="(\d+)"})? (\S+)$', re.MULTILINE)


def processes(router: Child) -> list[int]:
    """The processes that serve: the workers, or the router itself."""
    pid = router.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] or [pid]


def rounds_of(router: Child) -> dict[str, float]:
    """By worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{router.facts['metrics_port']}/metrics", timeout=10) as answer:
        return {worker: float(value) for worker, value in _ROUNDS.findall(answer.read().decode())}


def measure(router: Child, concurrency: int, tokens: int) -> dict[str, float]:
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


COLUMNS = {
    "router CPU us per round": ("cpu_us_per_round", 0),
    "rounds per router CPU second": ("rounds_per_cpu_s", 0),
    "rounds per second here": ("rounds_per_s", 0),
    "cores that the routers had": ("router_cores", 2),
    "share of the busiest process": ("busiest_share", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    counts = (1, arguments.workers)
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with ExitStack() as stack:
        routers = {}
        for count in counts:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moot-")))
            supervisor = stack.enter_context(Supervisor(folder))
            routers[count] = scripted_system(supervisor, folder, 3, more_flags=("--workers", str(count)))
            asyncio.run(load(f"http://127.0.0.1:{routers[count].port}", 32, arguments.tokens))
        for index in range(arguments.repetitions):
            for count in counts if index % 2 == 0 else reversed(counts):
                found[count].append(measure(routers[count], arguments.concurrency, arguments.tokens))
            print(f"repetition {index + 1} of {arguments.repetitions}", flush=True)
    rows: list[list[object]] = [
        [count, *(Interval.of([run[key] for run in runs]).text(digits) for key, digits in COLUMNS.values())]
        for count, runs in found.items()
    ]
    one, several = (found[count] for count in counts)
    pairs = [
        ratios([run[key] for run in several], [run[key] for run in one]).text() for key, _ in list(COLUMNS.values())[:4]
    ]
    rows.append(["ratio", *pairs, ""])
    publish(
        "router_scaling",
        ("router processes", *COLUMNS),
        rows,
        {"runs": found, "concurrency": arguments.concurrency, "tokens": arguments.tokens},
        lambda figure: draw(figure, found),
    )


def draw(figure: Any, found: dict[int, list[dict[str, float]]]) -> None:
    for place, key, title in (
        (121, "cpu_us_per_round", "router CPU per round, us"),
        (122, "rounds_per_s", "rounds per second on this machine"),
    ):
        axes = figure.add_subplot(place)
        axes.boxplot([[run[key] for run in runs] for runs in found.values()], tick_labels=[str(key) for key in found])
        axes.set(title=title, xlabel="router processes")
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
