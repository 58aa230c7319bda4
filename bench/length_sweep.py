"""Whether the goodput policy finds K by itself: against every fixed K, in virtual time with scripted costs.

    python -m bench.length_sweep [--noise 0.3] [--rounds 3000]

One verifier, and drafters enough for all, each with exact costs: a step takes 37 ms up to 16 rows and 2.5 ms for each
further row (two cores of a CPU, which 64 requests saturate), or 30 ms up to 64 rows and 0.2 ms for each further one
(like a GPU). For each concurrency a simulation per fixed K and one of the policy, on the same requests. `--noise 0.3`:
every duration is up to 30 % more or less than its cost, so that the policy learns from noisy ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import publish
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.requests import RouterPlan
from moot.simulation.texts import LoadClass, RandomTexts
from moot.simulation.verifiers import VerifierPlan
from moot.simulation.world import Outcome, Scenario, World

CONCURRENCIES = (1, 4, 16, 64)
BOUND = 0.95


@dataclass(frozen=True, slots=True)
class Costs:
    """Scripted costs of one machine, in seconds, and the drafter's chances by depth."""

    step: StepCost
    draft: DraftTime
    round_s: float
    network_s: float
    chances: tuple[float, ...]


CPU = StepCost.line(0.037, 0.0025, 16, 0.0002)
GPU = StepCost.line(0.030, 0.0002, 64, 0.00002)
MODEL_FREE = DraftTime(0.0008, 0.00005)
NEURAL = DraftTime(0.0, 0.003)
MACHINES = {
    "CPU, text that repeats itself": Costs(CPU, MODEL_FREE, 0.0006, 0.0002, (0.75,)),
    "CPU, free writing": Costs(CPU, MODEL_FREE, 0.0006, 0.0002, (0.06,)),
    "GPU, neural drafters": Costs(GPU, NEURAL, 0.00035, 0.001, (0.8, 0.75, 0.7)),
}


def simulate(costs: Costs, concurrency: int, length: int | None, noise: float, rounds: int, seed: int = 1) -> Outcome:
    """About `rounds` rounds of all requests together, after as many to warm up, and at least 200 steps of each;
    `length` None: the policy."""
    step_s = costs.step.seconds(concurrency, concurrency)
    seconds = max(rounds / concurrency * 1.5, 200) * step_s
    replicas = max(2, concurrency)
    scenario = Scenario(
        verifier=VerifierPlan(costs.step, noise=noise),
        pools=(PoolPlan("drafter", replicas, costs.draft, noise=noise),),
        router=RouterPlan(round_s=costs.round_s, network_s=costs.network_s, num_speculative_tokens=length),
        concurrency=concurrency,
        warm_up_s=seconds,
        measure_s=seconds,
    )
    texts = RandomTexts([LoadClass(output_tokens=400)], [costs.chances], 0.0, seed)
    return World(scenario, texts).run()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Tokens per second of every fixed K, and what the policy did."""

    fixed: dict[int, float]
    policy: Outcome

    @property
    def best(self) -> int:
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def of_best(self) -> float:
        return self.policy.tokens_per_s / self.fixed[self.best]

    @property
    def of_off(self) -> float:
        return self.policy.tokens_per_s / self.fixed[0]


def sweep(costs: Costs, concurrency: int, noise: float, rounds: int, lengths: Sequence[int] = range(9)) -> Sweep:
    fixed = {k: simulate(costs, concurrency, k, noise, rounds).tokens_per_s for k in lengths}
    return Sweep(fixed, simulate(costs, concurrency, None, noise, rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3000)
    arguments = parser.parse_args()
    rows, found = [], {}
    for name, costs in MACHINES.items():
        for concurrency in CONCURRENCIES:
            one = found[name, concurrency] = sweep(costs, concurrency, arguments.noise, arguments.rounds)
            rows.append(
                (
                    name,
                    concurrency,
                    one.best,
                    f"{one.fixed[one.best]:,.1f}",
                    f"{one.policy.tokens_per_s:,.1f}",
                    f"{one.of_best:.3f}",
                    f"{one.of_off:.2f}",
                    f"{one.policy.mean_length:.2f}",
                    f"{one.policy.switches_per_1000_rounds:.0f}",
                )
            )
            print(*rows[-1], sep="  ", flush=True)

    def draw(figure: Any) -> None:
        places = figure.subplots(1, len(MACHINES))
        for axes, name in zip(places, MACHINES, strict=True):
            for concurrency in CONCURRENCIES:
                one = found[name, concurrency]
                top = one.fixed[one.best]
                (line,) = axes.plot(list(one.fixed), [speed / top for speed in one.fixed.values()], label=concurrency)
                at = one.policy.mean_length
                axes.plot([at], [one.of_best], "o", color=line.get_color())
            axes.set(title=name, xlabel="fixed K; o: the policy", ylim=(0, 1.1))
        places[0].set(ylabel="tokens/s, of the best fixed K")
        places[0].legend(title="concurrency")

    header = (
        *("costs", "concurrency", "best K", "its tokens/s", "policy", "of best", "of K = 0", "mean K"),
        "switches per 1,000 rounds",
    )
    facts = {"noise": arguments.noise, "fixed": {f"{name}, {c}": one.fixed for (name, c), one in found.items()}}
    publish("length_sweep", header, rows, facts, draw)
    return 0 if all(one.of_best >= BOUND for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
