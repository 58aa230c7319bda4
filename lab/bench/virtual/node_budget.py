"""Whether the policy spends verify time on the right draft nodes: against fixed trees, in virtual time.

    python -m lab.bench.node_budget [--rounds 1000] [--seeds 5]

One verifier and three drafters that are cheap and now and then wrong together. A step takes 37 ms up to 16 rows and
2.5 ms for each further row (two cores of a CPU), or 30 ms up to 64 rows and 0.2 ms for each further one (like a GPU).
Requests copy text, write freely, or do either; nobody is told which, and no confidence gives it away. For each of the
loads a run per fixed tree, of 0, 3, 7 or 15 nodes in every round, and one of the policy, on the same texts, durations
up to 30 % off. Ratios are of runs with the same seed; the best fixed tree is the one with the most tokens in all.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.virtual import CPU, GPU, AgainstFixed, Map, VirtualConfig, against_fixed, all_cores
from moot.config import option
from moot.core.speculation.policy import SpeculationOptions
from moot.simulation.machine_costs import DraftTime
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import LoadClass, RandomTexts, SimulatedText
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World

BENCH = Bench("node_budget", __doc__, measures=("moot/core", "moot/simulation"))
CONCURRENCIES = (1, 4, 16, 64)
BUDGETS = (0, 3, 7, 15)
DEPTH = 8
BOUND = 0.97
NOISE = 0.3
CHANCES = ((0.85,), (0.75,), (0.65,))
CORRELATION = 0.5
DRAFTING = DraftTime(0.0008, 0.00005)
COPY, FREE = 1.0, 0.25
TEXTS = {"copy": (COPY,), "free": (FREE,), "mixed": (COPY, FREE, FREE)}
"""Skill of the requests, one after the other."""
MACHINES = {
    "CPU": (CPU, "gathered", 0.0002),
    "GPU": (GPU, "ready", 0.001),
}
HEADER = (
    *("costs", "texts", "concurrency", *(f"tree of {budget}" for budget in BUDGETS), "policy"),
    *("of the best tree (95 %)", "within 3 %", "its nodes per round"),
)


@dataclass(frozen=True, kw_only=True)
class Config(VirtualConfig):
    rounds: int = option(1000, help="rounds of all requests together that are counted")
    seeds: int = option(5, help="seeds of every arm")


class InTurn:
    """Texts of these skills in turns: drawn at random, the few of a run would differ from those of the next."""

    def __init__(self, skills: Sequence[float], seed: int) -> None:
        self._kinds = [
            RandomTexts([LoadClass(output_tokens=128, skill=skill)], CHANCES, CORRELATION, 100 * seed + number)
            for number, skill in enumerate(skills)
        ]
        self._next = 0

    def next(self) -> SimulatedText:
        self._next += 1
        return self._kinds[self._next % len(self._kinds)].next()


def simulate(
    machine: str, texts: str, concurrency: int, rounds: int, budget: int | None, seed: int
) -> SimulatedOutcome:
    """About `rounds` rounds of all requests together, and at least 100 steps, after at least 200 to warm up: the policy
    begins knowing nothing, with all requests at once. `budget`: nodes of every tree; None: the policy."""
    step, batching, network_s = MACHINES[machine]
    step_s = step.seconds(concurrency, concurrency)
    seconds = rounds / concurrency * 1.5 * step_s
    scenario = Scenario(
        verifier=VerifierPlan(step, batching=batching, noise=NOISE),
        pools=tuple(
            PoolPlan(f"drafter-{number}", max(2, concurrency), DRAFTING, noise=NOISE) for number in range(len(CHANCES))
        ),
        router=RouterPlan(
            round_s=0.0002,
            behind_s=0.0001,
            network_s=network_s,
            num_speculative_tokens=None if budget is None else min(budget, DEPTH),
        ),
        concurrency=concurrency,
        speculation=SpeculationOptions(num_speculative_tokens=DEPTH, max_draft_tokens=budget or 16),
        warm_up_s=max(seconds, 200 * step_s),
        measure_s=max(seconds, 100 * step_s),
    )
    return World(scenario, InTurn(TEXTS[texts], seed)).run()


def compare(
    machine: str, texts: str, concurrency: int, rounds: int, seeds: Sequence[int], run: Map = map
) -> AgainstFixed:
    return against_fixed(partial(simulate, machine, texts, concurrency, rounds), BUDGETS, seeds, run)


def row(plan: tuple[str, str, int], one: AgainstFixed) -> tuple[object, ...]:
    return (
        *plan,
        *(f"{statistics.median(speeds):,.1f}" for speeds in one.fixed.values()),
        f"{statistics.median(run.tokens_per_s for run in one.policy):,.1f}",
        one.of(one.best).text(3),
        one.of(one.best).verdict(at_least=BOUND),
        f"{statistics.median(run.nodes_per_round for run in one.policy):.2f}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    plans = [(machine, texts, count) for machine in MACHINES for texts in TEXTS for count in CONCURRENCIES]
    rows: list[tuple[object, ...]] = []
    with all_cores() as run:
        for plan in plans:
            rows.append(row(plan, compare(*plan, config.rounds, config.chosen, run)))
            print(*rows[-1], sep="  ", flush=True)
    facts = {"seeds": list(config.chosen), "noise": NOISE}
    BENCH.publish(config, Table(HEADER, rows, labels=3), facts, HEADER[-3], argv=argv)
    return 0 if all("missed" not in one for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
