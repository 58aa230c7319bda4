"""What a verifier that never waits delivers: against N / step, in simulated time.

    python -m lab.bench.free_running [--seeds 7]

N / step: N requests with one token in each step, what an engine that batches by itself delivers. A step takes 30 ms to
64 rows and 0.2 ms for each further one, unless a row says otherwise (then all of it is shorter alike); a message 1 ms;
router CPU of 0.35 ms for a round. A cell has the median of the seeds, its 95 % interval, and the bound of free-running
verification's design. Prompts of 64 tokens and answers of 256, each half to one and a half of that, so that
reading prompts (0.02 ms a token) is about 1 % of the time at 64 requests. Every seed has its own requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from lab.bench.harness.intervals import Interval
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.virtual import GPU, VirtualConfig, all_cores
from moot.config import option
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan, chunk_of
from moot.simulation.simulated_texts import LoadClass, RandomTexts
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World

BENCH = Bench("free_running", __doc__, measures=("moot/core", "moot/simulation"))
LOAD = (LoadClass(prompt_tokens=64, output_tokens=256),)
ROUND_S = 0.00035
STEP_S = 0.030
"""Of GPU, up to 64 rows."""
REQUESTS = (1, 8, 32, 64, 128)
HEADER = ("requests at a time", *map(str, REQUESTS))


@dataclass(frozen=True, kw_only=True)
class Config(VirtualConfig):
    steps: int = option(300, help="steps that are counted, after 200 to warm up")


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter: its chances by depth, seconds of a token, and where it runs."""

    chances: tuple[float, ...]
    token_s: float = 0.0001
    place: str = "pool"


@dataclass(frozen=True, slots=True)
class Case:
    """A machine and its drafters; `bounds`: requests to the least part of N / step."""

    bounds: dict[int, float]
    drafters: tuple[Drafter, ...] = ()
    step_s: float = STEP_S
    network_s: float = 0.001

    @property
    def cost(self) -> StepCost:
        """Where a step is shorter, rows and prompts are too."""
        return GPU.stretched(self.step_s / STEP_S)


MODEL_FREE, NEURAL, ATTACHED = (0.35, 0.3, 0.3), (0.8, 0.7, 0.6), (0.8, 0.75, 0.7)
LOCAL = Drafter(MODEL_FREE, place="verifier")
CASES = {
    "K = 0": Case({1: 0.97, 8: 0.97, 32: 0.97, 64: 0.97}),
    "K = 0, 10 ms steps, 5 ms network": Case({1: 0.97, 8: 0.97, 32: 0.97, 64: 0.97}, (), 0.010, 0.005),
    "K = 0, 3 ms steps": Case({1: 0.97, 8: 0.97, 32: 0.97, 64: 0.93}, (), 0.003),
    "model-free, behind the network": Case({1: 1.15, 8: 1.15, 32: 0.98, 64: 0.98}, (Drafter(MODEL_FREE),)),
    "model-free, in the verifier": Case({1: 1.4, 8: 1.4, 32: 1.3, 64: 0.98, 128: 0.98}, (LOCAL,)),
    "neural, 3 ms a token, and local": Case({1: 1.8, 8: 1.75, 32: 1.42, 64: 1.05}, (Drafter(NEURAL, 0.003), LOCAL)),
    "neural, 8 ms a token, and local": Case({1: 1.55, 8: 1.55, 32: 1.4, 64: 1.05}, (Drafter(NEURAL, 0.008), LOCAL)),
    "attached, 1 ms a token": Case({1: 2.55, 8: 2.4, 32: 1.7, 64: 1.15}, (Drafter(ATTACHED, 0.001, "attached"),)),
}


def simulate(case: Case, concurrency: int, steps: int, seed: int) -> SimulatedOutcome:
    step_s = case.step_s
    scenario = Scenario(
        verifier=VerifierPlan(case.cost, batching="free", max_num_seqs=max(64, concurrency)),
        pools=tuple(
            PoolPlan(
                f"drafter-{number}",
                time=DraftTime(0.0, one.token_s),
                place=one.place,
                chunk=chunk_of(step_s, one.token_s),
            )
            for number, one in enumerate(case.drafters)
        ),
        router=RouterPlan.of_round(ROUND_S, case.network_s),
        concurrency=concurrency,
        warm_up_s=200 * step_s,
        measure_s=steps * step_s,
    )
    return World(scenario, RandomTexts(LOAD, [one.chances for one in case.drafters], 0.5, seed)).run()


def of_plain(case: Case, concurrency: int, found: Sequence[SimulatedOutcome]) -> Interval:
    """Tokens per second, of N / step."""
    step_s = case.cost.seconds(concurrency, concurrency)
    return Interval.of([one.tokens_per_s * step_s / concurrency for one in found])


@dataclass(frozen=True, slots=True)
class Cell:
    """One case at one number of requests; of the seed with the median speed how busy everybody was."""

    part: Interval
    bound: float
    tokens_per_round: float
    nodes_per_round: float
    router_utilisation: float
    drafter_utilisation: float

    @property
    def verdict(self) -> str:
        return self.part.verdict(at_least=self.bound)

    def text(self) -> str:
        return f"{self.part.text(3)}, {self.bound} {self.verdict}"


def cell(case: Case, concurrency: int, found: Sequence[SimulatedOutcome]) -> Cell:
    middle = sorted(found, key=lambda one: one.tokens_per_s)[len(found) // 2]
    return Cell(
        of_plain(case, concurrency, found),
        case.bounds[concurrency],
        middle.tokens_per_round,
        middle.nodes_per_round,
        middle.router_utilisation,
        middle.drafter_utilisation,
    )


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    cells: dict[str, dict[int, Cell]] = {name: {} for name in CASES}
    with all_cores() as run:
        for name, case in CASES.items():
            for concurrency in case.bounds:
                found = list(run(partial(simulate, case, concurrency, config.steps), config.chosen))
                cells[name][concurrency] = made = cell(case, concurrency, found)
                print(name, concurrency, made.text(), sep="  ", flush=True)
    rows = [(name, *(of[count].text() if count in of else "" for count in REQUESTS)) for name, of in cells.items()]
    facts = {
        "seeds": list(config.chosen),
        "cells": {name: {count: asdict(one) for count, one in of.items()} for name, of in cells.items()},
    }
    BENCH.publish(config, Table(HEADER, rows), facts, argv=argv)
    return 0 if all(one.verdict != "missed" for of in cells.values() for one in of.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
