"""Whether the goodput policy finds K by itself: against every fixed K, in virtual time with scripted costs.

    python -m bench.length_sweep [--noise 0.3] [--rounds 300] [--seeds 7]

One verifier, and drafters enough for all, each with exact costs: a step takes 37 ms up to 16 rows and 2.5 ms for each
further row (two cores of a CPU, which 64 requests saturate), or 30 ms up to 64 rows and 0.2 ms for each further one
(like a GPU). For each concurrency a simulation per fixed K and one of the policy, on the same requests. `--noise 0.3`:
every duration is up to 30 % more or less than its cost, so that the policy learns from noisy ones. Ratios are of runs
on the same requests, one per seed; the best fixed K is that of the most tokens over all seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from lab.bench.intervals import Interval, ratios
from lab.bench.report import publish
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.router_plan import RouterPlan
from moot.simulation.texts import LoadClass, RandomTexts
from moot.simulation.verifiers import VerifierPlan
from moot.simulation.world import Outcome, Scenario, World

CONCURRENCIES = (1, 4, 16, 64)
LENGTHS = (0, 1, 2, 3, 4, 6, 8)
BOUND = 0.95
FIRST_SEED = 11
"""Not those on which the policy's constants were chosen."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Scripted costs of one machine, in seconds, the drafter's chances by depth, how steps take requests, and what
    these are about."""

    step: StepCost
    draft: DraftTime
    round_s: float
    network_s: float
    chances: tuple[float, ...]
    batching: str
    classes: tuple[LoadClass, ...] = (LoadClass(output_tokens=400),)


CPU = StepCost.line(0.037, 0.0025, 16, 0.0002)
GPU = StepCost.line(0.030, 0.0002, 64, 0.00002)
MODEL_FREE = DraftTime(0.0008, 0.00005)
NEURAL = DraftTime(0.0, 0.003)
MIXED = (LoadClass(0.6, output_tokens=128, skill=0.08), LoadClass(0.4, output_tokens=128))
"""Short answers, most of which cannot be drafted: each must find out anew what it is like."""
MACHINES = {
    "CPU, text that repeats itself": Costs(CPU, MODEL_FREE, 0.0003, 0.0002, (0.75,), "gathered"),
    "CPU, free writing": Costs(CPU, MODEL_FREE, 0.0003, 0.0002, (0.06,), "gathered"),
    "CPU, short answers of two kinds": Costs(CPU, MODEL_FREE, 0.0003, 0.0002, (0.75,), "gathered", MIXED),
    "GPU, neural drafters": Costs(GPU, NEURAL, 0.00035, 0.001, (0.8, 0.75, 0.7), "ready"),
}


def simulate(costs: Costs, concurrency: int, length: int | None, noise: float, rounds: int, seed: int = 1) -> Outcome:
    """About `rounds` rounds of all requests together, and at least 60 steps, after as many to warm up, and at least
    200 steps: the policy begins knowing nothing, with all requests at once. `length` None: the policy."""
    step_s = costs.step.seconds(concurrency, concurrency)
    seconds = rounds / concurrency * 1.5 * step_s
    replicas = max(2, concurrency)
    scenario = Scenario(
        verifier=VerifierPlan(costs.step, batching=costs.batching, noise=noise),
        pools=(PoolPlan("drafter", replicas, costs.draft, noise=noise),),
        router=RouterPlan(
            round_s=costs.round_s * 0.6,
            behind_s=costs.round_s * 0.4,
            network_s=costs.network_s,
            num_speculative_tokens=length,
        ),
        concurrency=concurrency,
        warm_up_s=max(seconds, 200 * step_s),
        measure_s=max(seconds, 60 * step_s),
    )
    texts = RandomTexts(costs.classes, [costs.chances], 0.0, seed)
    return World(scenario, texts).run()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Per seed: tokens per second of every fixed K, and what the policy did."""

    fixed: dict[int, list[float]]
    policy: list[Outcome]

    @property
    def best(self) -> int:
        return max(self.fixed, key=lambda length: sum(self.fixed[length]))

    def of(self, length: int) -> Interval:
        return ratios([one.tokens_per_s for one in self.policy], self.fixed[length])

    @property
    def mean_length(self) -> float:
        return statistics.median(one.mean_length for one in self.policy)

    @property
    def switches(self) -> float:
        """Per 1,000 rounds."""
        return statistics.median(one.switches_per_1000_rounds for one in self.policy)


Job = tuple[str, int, int | None, float, int, int]


def outcome(job: Job) -> Outcome:
    """Of (machine, concurrency, fixed K or None, noise, rounds, seed)."""
    name, *rest = job
    return simulate(MACHINES[name], *rest)


def sweep(
    machine: str,
    concurrency: int,
    noise: float,
    rounds: int,
    lengths: Sequence[int] = LENGTHS,
    seeds: Sequence[int] = (1,),
    run: Callable[[Callable[[Job], Outcome], Iterable[Job]], Iterable[Outcome]] = map,
) -> Sweep:
    """`run`: a map, of one process or of several."""
    plans = [(length, seed) for length in (*lengths, None) for seed in seeds]
    found = dict(
        zip(
            plans,
            run(outcome, [(machine, concurrency, length, noise, rounds, seed) for length, seed in plans]),
            strict=True,
        )
    )
    fixed = {length: [found[length, seed].tokens_per_s for seed in seeds] for length in lengths}
    return Sweep(fixed, [found[None, seed] for seed in seeds])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=7)
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    found = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as processes:
        for name in MACHINES:
            for concurrency in CONCURRENCIES:
                one = found[name, concurrency] = sweep(
                    name, concurrency, arguments.noise, arguments.rounds, seeds=seeds, run=processes.map
                )
                print(*row(name, concurrency, one), sep="  ", flush=True)
    report(found, {"noise": arguments.noise, "seeds": list(seeds)})
    return 0 if all(one.of(one.best).high >= BOUND for one in found.values()) else 1


def row(name: str, concurrency: int, one: Sweep) -> tuple[object, ...]:
    return (
        name,
        concurrency,
        one.best,
        f"{statistics.median(one.fixed[one.best]):,.1f}",
        f"{statistics.median(run.tokens_per_s for run in one.policy):,.1f}",
        one.of(one.best).text(3),
        one.of(one.best).verdict(at_least=BOUND),
        one.of(0).text(),
        f"{one.mean_length:.2f}",
        f"{one.switches:.0f}",
    )


def report(found: Mapping[tuple[str, int], Sweep], facts: Mapping[str, Any]) -> None:
    """Table and picture of all sweeps."""

    def draw(figure: Any) -> None:
        places = figure.subplots(1, len(MACHINES))
        for axes, name in zip(places, MACHINES, strict=True):
            for concurrency in CONCURRENCIES:
                one = found[name, concurrency]
                top = sum(one.fixed[one.best])
                (line,) = axes.plot(
                    list(one.fixed), [sum(speeds) / top for speeds in one.fixed.values()], label=concurrency
                )
                axes.plot([one.mean_length], [one.of(one.best).median], "o", color=line.get_color())
            axes.set(title=name, xlabel="fixed K; o: the policy", ylim=(0, 1.1))
        places[0].set(ylabel="tokens/s, of the best fixed K")
        places[0].legend(title="concurrency")

    header = (
        *("costs", "concurrency", "best K", "its tokens/s", "policy", "of best (95 %)", "within 5 %", "of K = 0"),
        *("mean K", "switches per 1,000 rounds"),
    )
    fixed = {f"{name}, {concurrency}": one.fixed for (name, concurrency), one in found.items()}
    rows = [row(*plan, one) for plan, one in found.items()]
    publish("length_sweep", header, rows, {**facts, "fixed": fixed}, draw)


if __name__ == "__main__":
    raise SystemExit(main())
