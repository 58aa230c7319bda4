"""Whether the goodput policy finds K by itself: against every fixed K, in virtual time with scripted costs.

    python -m lab.bench.length_sweep [--noise 0.3] [--rounds 300] [--seeds 7]

One verifier, and drafters enough for all, each with exact costs: a step takes 37 ms up to 16 rows and 2.5 ms for each
further row (two cores of a CPU, which 64 requests saturate), or 30 ms up to 64 rows and 0.2 ms for each further one
(like a GPU). For each concurrency a simulation per fixed K and one of the policy, on the same requests. `--noise 0.3`:
every duration is up to 30 % more or less than its cost, so that the policy learns from noisy ones. Ratios are of runs
on the same requests, one per seed; the best fixed K is that of the most tokens over all seeds.
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
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import LoadClass, RandomTexts
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World

BENCH = Bench("length_sweep", __doc__, measures=("moot/core", "moot/simulation"))
CONCURRENCIES = (1, 4, 16, 64)
LENGTHS = (0, 1, 2, 3, 4, 6, 8)
BOUND = 0.95
HEADER = (
    *("costs", "concurrency", "best K", "policy of best (95 %)", "within 5 %", "of K = 0", "mean K"),
    "switches per 1,000 rounds",
)


@dataclass(frozen=True, kw_only=True)
class Config(VirtualConfig):
    noise: float = option(0.3, help="durations are up to this part more or less than their cost")
    rounds: int = option(300, help="rounds of all requests together that are counted")


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


def simulate(
    costs: Costs, concurrency: int, noise: float, rounds: int, length: int | None, seed: int = 1
) -> SimulatedOutcome:
    """About `rounds` rounds of all requests together, and at least 60 steps, after as many to warm up, and at least
    200 steps: the policy begins knowing nothing, with all requests at once. `length` None: the policy."""
    step_s = costs.step.seconds(concurrency, concurrency)
    seconds = rounds / concurrency * 1.5 * step_s
    scenario = Scenario(
        verifier=VerifierPlan(costs.step, batching=costs.batching, noise=noise),
        pools=(PoolPlan("drafter", max(2, concurrency), costs.draft, noise=noise),),
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
    return World(scenario, RandomTexts(costs.classes, [costs.chances], 0.0, seed)).run()


def sweep(
    machine: str,
    concurrency: int,
    noise: float,
    rounds: int,
    lengths: Sequence[int] = LENGTHS,
    seeds: Sequence[int] = (1,),
    run: Map = map,
) -> AgainstFixed:
    return against_fixed(partial(simulate, MACHINES[machine], concurrency, noise, rounds), lengths, seeds, run)


def mean_length(one: AgainstFixed) -> float:
    return statistics.median(run.mean_length for run in one.policy)


def switches(one: AgainstFixed) -> float:
    """Per 1,000 rounds."""
    return statistics.median(run.switches_per_1000_rounds for run in one.policy)


def row(name: str, concurrency: int, one: AgainstFixed) -> tuple[object, ...]:
    return (
        name,
        concurrency,
        one.best,
        one.of(one.best).text(3),
        one.of(one.best).verdict(at_least=BOUND),
        f"{one.of(0).median:.2f}",
        f"{mean_length(one):.2f}",
        f"{switches(one):.0f}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    found: dict[tuple[str, int], AgainstFixed] = {}
    with all_cores() as run:
        for plan in [(name, concurrency) for name in MACHINES for concurrency in CONCURRENCIES]:
            found[plan] = sweep(*plan, config.noise, config.rounds, seeds=config.chosen, run=run)
            print(*row(*plan, found[plan]), sep="  ", flush=True)
    fixed = {f"{name}, {concurrency}": one.fixed for (name, concurrency), one in found.items()}
    facts = {"noise": config.noise, "seeds": list(config.chosen), "fixed": fixed}
    table = Table(HEADER, [row(*plan, one) for plan, one in found.items()], labels=2)
    BENCH.publish(config, table, facts, HEADER[3], argv=argv)
    return 0 if all(one.of(one.best).high >= BOUND for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
