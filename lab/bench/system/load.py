"""Drafting on against off under load: the whole system at several concurrencies, over HTTP, in turns.

    python -m lab.bench.load [--concurrency 1,4,16,64] [--fixed 2,4,8] [--repetitions 7] [--prompts FILE [--held-out]]

The whole system as processes on this machine, as in `moot demo`. A load is `concurrency` callers, each of which asks
for its next answer when it has one (eight answers at least in all, even over the categories of the prompts), greedy and
of equal length. Loads with K chosen by the policy, with drafting off (K = 0) and with each fixed K take turns. Every
ratio is one of interleaved pairs; tokens/s count everything from the first request sent to the last token. Answers are
compared id by id. With --keep, figures of other concurrencies stay from the last result, so that a long table can be
measured in parts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.bench.harness.arms import Arm, Runs, in_turns
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.prompts import read_prompts, repeated
from lab.bench.harness.systems import LoadConfig, Loads
from moot.commands.common import say
from moot.commands.system import System, running
from moot.config import option

BENCH = Bench("load", __doc__, measures=("services", "moot/core", "moot/model"))
POLICY, OFF = "policy", "K = 0"
LEAST = 0.95
HEADER = (
    *("concurrency", "tokens/s off", "policy of off", "best fixed", "policy of best fixed", "mean K"),
    *("K changes per 1,000 rounds", "TTFT of off", "token latency of off", "identical"),
)


@dataclass(frozen=True, kw_only=True)
class Config(LoadConfig):
    limit: int = option(64, help="prompts taken from the file, evenly over its categories")
    concurrency: tuple[int, ...] = option((1, 4, 16, 64), help="callers at a time")
    fixed: tuple[int, ...] = option((2, 4, 8), help="fixed K of the sweep, beside 0")
    keep: bool = option(False, help="keep figures of other concurrencies from the last result")

    @property
    def arms(self) -> list[Arm]:
        fixed = [Arm(f"K = {k}", {"num_speculative_tokens": k}) for k in (0, *self.fixed)]
        return [Arm(POLICY), *fixed]


def measure(system: System, config: Config, prompts: Mapping[str, str], concurrency: int) -> dict[str, Any]:
    loads = Loads(system, config.max_tokens)
    asked = repeated(prompts, max(concurrency, config.answers))

    def take(arm: Arm) -> dict[str, float]:
        return loads.run(arm.name, system.router, asked, concurrency, arm.differs).figures

    say(f"{concurrency} callers")
    return {"runs": in_turns(config.arms, take, config.repetitions), "identical": not loads.differing}


def row(concurrency: str, found: Mapping[str, Any]) -> list[str]:
    runs = Runs(found["runs"])
    best = max(
        (name for name in runs.of if name != POLICY), key=lambda name: runs.interval(name, "tokens_per_s").median
    )
    rounds = sum(runs.values(POLICY, "rounds"))
    asked = sum(run["mean_k"] * run["rounds"] for run in runs.of[POLICY])
    of_off, of_best = (runs.ratio(POLICY, name, "tokens_per_s") for name in (OFF, best))
    return [
        concurrency,
        f"{runs.interval(OFF, 'tokens_per_s').median:,.1f}",
        f"{of_off.text()} {of_off.verdict(at_least=LEAST)}",
        best,
        f"{of_best.text()} {of_best.verdict(at_least=LEAST)}",
        f"{asked / max(rounds, 1):.2f}",
        f"{1000 * sum(runs.values(POLICY, 'k_changes')) / max(rounds, 1):.0f}",
        runs.ratio(POLICY, OFF, "first_token_s").text(),
        runs.ratio(POLICY, OFF, "token_gap_s").text(),
        "yes" if found["identical"] else "NO",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    found: dict[str, Any] = BENCH.kept(config).get("found", {}) if config.keep else {}
    prompts = read_prompts(config, config.limit, over_categories=True)
    with running(config, "load", say) as system:
        for concurrency in config.concurrency:
            found[str(concurrency)] = measure(system, config, prompts, concurrency)
    found = {key: found[key] for key in sorted(found, key=int)}
    table = Table(HEADER, [row(concurrency, one) for concurrency, one in found.items()])
    BENCH.publish(config, table, {"found": found}, HEADER[2], argv=argv)
    return 0 if all(one["identical"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
