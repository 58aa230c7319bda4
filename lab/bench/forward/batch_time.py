"""Time of one step of several requests, with the attention of all in one call and with a call for each.

    python -m lab.bench.batch_time --model PATH [--context 200] [--repetitions 11] [--threads 2]

By torch's operations: compiled kernels compute all rows of a step in one call anyway. Everything else of the step is
the same, and so are its numbers. Both ways take turns in one process, and each ratio is one of interleaved pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.bench.harness.arms import Runs
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.passes import MODES, MS, Pass, PassConfig, filled, step, times
from moot.config import option
from moot.core.errors import ConfigError
from moot.model.backend import plain_runner
from moot.model.cache.contiguous import PAGE_SLOTS, round_up
from moot.model.loading.load import load_model
from moot.model.rows import RowRules
from moot.model.runner import ModelRunner

BENCH = Bench("batch_time", __doc__, measures=("moot/model",))
TREE = (-1, 0, 1, 2, 3, 0, 5, 1, 7)
"""Parents: three paths below one root, of five, three and four nodes."""
APART, TOGETHER = "one by one", "together"
SHAPES = {
    **{
        f"{requests} x {rows}": (requests, rows, None) for requests, rows in ((64, 1), (16, 1), (1, 1), (16, 5), (1, 9))
    },
    **{f"{requests} trees of {len(TREE)}": (requests, len(TREE), TREE) for requests in (16, 4)},
}
"""Requests of the step, rows of each with the root, and the parents of a tree."""


@dataclass(frozen=True, kw_only=True)
class Config(PassConfig):
    context: int = option(200, help="tokens in the cache")


def key(mode: str, shape: str, way: str) -> str:
    return f"{mode}, {shape}, {way}"


def ruled(runner: ModelRunner, rules: RowRules, once: Pass) -> Pass:
    def with_rules() -> None:
        runner.rules = rules
        once()

    return with_rules


def all_steps(config: Config, threads: int) -> dict[str, Pass]:
    """Raises ConfigError where several requests' attention is never one call."""
    loaded = load_model(config.model, device="cpu", dtype="bfloat16", num_threads=threads, native=False)
    most = max(requests for requests, _, _ in SHAPES.values())
    found: dict[str, Pass] = {}
    for mode, deterministic in MODES:
        runner = plain_runner(loaded, most * round_up(config.context + len(TREE), PAGE_SLOTS), deterministic)
        if not runner.rules.together:
            raise ConfigError(f"for this model on this machine there is one way only in {mode} mode: {APART}")
        caches = filled(runner, config.context, most)
        for shape, (requests, rows, parents) in SHAPES.items():
            for way in (APART, TOGETHER):
                rules = replace(runner.rules, together=way == TOGETHER)
                found[key(mode, shape, way)] = ruled(runner, rules, step(runner, caches[:requests], rows, parents))
    return found


def summary(runs: Runs) -> Table:
    rows = []
    for shape in SHAPES:
        for mode, _ in MODES:
            apart, together = (key(mode, shape, way) for way in (APART, TOGETHER))
            both = (runs.interval(name, MS).text(1) for name in (apart, together))
            rows.append((shape, mode, *both, runs.ratio(together, apart, MS).text()))
    header = (
        "step (requests x rows)",
        "mode",
        f"{APART}, ms (95 %)",
        f"{TOGETHER}, ms (95 %)",
        f"{TOGETHER} of {APART}",
    )
    return Table(header, rows, labels=2)


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    threads = config.set_threads()
    runs = times(all_steps(config, threads), config.repetitions, warm_up=1)
    facts = {"context": config.context, "threads": threads, "runs": runs.of}
    BENCH.publish(config, summary(runs), facts, f"{TOGETHER} of {APART}", argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
