"""Whether the policy spends verify time on the right draft nodes: against fixed trees, in virtual time.

    python -m bench.node_budget [--rounds 1000] [--seeds 5]

One verifier and three drafters that are cheap and now and then wrong together. A step takes 37 ms up to 16 rows and
2.5 ms for each further row (two cores of a CPU), or 30 ms up to 64 rows and 0.2 ms for each further one (like a GPU).
Requests copy text, write freely, or do either; nobody is told which, and no confidence gives it away. For each of the
loads a run per fixed tree, of 0, 3, 7 or 15 nodes in every round, and one of the policy, on the same texts, durations
up to 30 % off. Ratios are of runs with the same seed; the best fixed tree is the one with the most tokens in all.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from lab.bench.intervals import Interval, ratios
from lab.bench.report import publish
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.router_plan import RouterPlan
from moot.simulation.texts import LoadClass, RandomTexts, Text
from moot.simulation.verifiers import VerifierPlan
from moot.simulation.world import Outcome, Scenario, World

CONCURRENCIES = (1, 4, 16, 64)
BUDGETS = (0, 3, 7, 15)
DEPTH = 8
BOUND = 0.97
FIRST_SEED = 11
NOISE = 0.3
CHANCES = ((0.85,), (0.75,), (0.65,))
CORRELATION = 0.5
DRAFTING = DraftTime(0.0008, 0.00005)
COPY, FREE = 1.0, 0.25
TEXTS = {"copy": (COPY,), "free": (FREE,), "mixed": (COPY, FREE, FREE)}
"""Skill of the requests, one after the other."""
MACHINES = {
    "CPU": (StepCost.line(0.037, 0.0025, 16, 0.0002), "gathered", 0.0002),
    "GPU": (StepCost.line(0.030, 0.0002, 64, 0.00002), "ready", 0.001),
}


class InTurn:
    """Texts of these skills in turns: drawn at random, the few of a run would differ from those of the next."""

    def __init__(self, skills: Sequence[float], seed: int) -> None:
        self._kinds = [
            RandomTexts([LoadClass(output_tokens=128, skill=skill)], CHANCES, CORRELATION, 100 * seed + number)
            for number, skill in enumerate(skills)
        ]
        self._next = 0

    def next(self) -> Text:
        self._next += 1
        return self._kinds[self._next % len(self._kinds)].next()


Job = tuple[str, str, int, int | None, int, int]


def simulate(machine: str, texts: str, concurrency: int, budget: int | None, rounds: int, seed: int) -> Outcome:
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
        max_speculative_tokens=DEPTH,
        max_draft_tokens=budget or 16,
        warm_up_s=max(seconds, 200 * step_s),
        measure_s=max(seconds, 100 * step_s),
    )
    return World(scenario, InTurn(TEXTS[texts], seed)).run()


@dataclass(frozen=True, slots=True)
class Compared:
    """Per seed: tokens per second of every fixed tree, and what the policy did."""

    fixed: dict[int, list[float]]
    policy: list[Outcome]

    @property
    def best(self) -> int:
        return max(self.fixed, key=lambda budget: sum(self.fixed[budget]))

    def of(self, budget: int) -> Interval:
        return ratios([one.tokens_per_s for one in self.policy], self.fixed[budget])

    @property
    def nodes(self) -> float:
        """Of the policy, verified per round."""
        return statistics.median(one.nodes_per_round for one in self.policy)


def outcome(job: Job) -> Outcome:
    return simulate(*job)


def compare(
    machine: str,
    texts: str,
    concurrency: int,
    rounds: int,
    seeds: Sequence[int],
    budgets: Sequence[int] = BUDGETS,
    run: Callable[[Callable[[Job], Outcome], Iterable[Job]], Iterable[Outcome]] = map,
) -> Compared:
    """`run`: a map, of one process or of several."""
    plans = [(budget, seed) for budget in (*budgets, None) for seed in seeds]
    jobs = [(machine, texts, concurrency, budget, rounds, seed) for budget, seed in plans]
    found = dict(zip(plans, run(outcome, jobs), strict=True))
    fixed = {budget: [found[budget, seed].tokens_per_s for seed in seeds] for budget in budgets}
    return Compared(fixed, [found[None, seed] for seed in seeds])


def row(plan: tuple[str, str, int], one: Compared) -> tuple[object, ...]:
    return (
        *plan,
        *(f"{statistics.median(one.fixed[budget]):,.1f}" for budget in one.fixed),
        f"{statistics.median(run.tokens_per_s for run in one.policy):,.1f}",
        one.of(one.best).text(3),
        one.of(one.best).verdict(at_least=BOUND),
        f"{one.nodes:.2f}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    rows: list[tuple[object, ...]] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as processes:
        for machine in MACHINES:
            for texts in TEXTS:
                for concurrency in CONCURRENCIES:
                    one = compare(machine, texts, concurrency, arguments.rounds, seeds, run=processes.map)
                    rows.append(row((machine, texts, concurrency), one))
                    print(*rows[-1], sep="  ", flush=True)
    header = ("costs", "texts", "concurrency", *(f"tree of {budget}" for budget in BUDGETS), "policy")
    header += ("of the best tree (95 %)", "within 3 %", "its nodes per round")
    publish("node_budget", header, rows, {"seeds": list(seeds), "noise": NOISE})
    return 0 if all("missed" not in one for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
