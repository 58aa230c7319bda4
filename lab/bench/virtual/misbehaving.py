"""What a drafter that misbehaves costs after its first hundred rounds: three good drafters with it and without it.

    python -m lab.bench.misbehaving [--costs gpu] [--concurrency 1,4,16] [--seeds 7] [--rounds 300] [--keep]

In virtual time with scripted costs, like a GPU's (a step takes 30 ms up to 64 rows and 0.2 ms for each further one, a
drafted token 3 ms) or like the demo's on two cores (`--costs cpu`: a step takes 14.5 ms and 0.25 ms for each further
row, the three drafters are in the router and answer at once, the fourth takes 0.5 ms for a token): beside three good
drafters one that is bad (random tokens, sure of each), slow (ten times the time of the others, and as good), lying (as
good as the best for its first hundred answers, wrong from then on, always sure), silent (never answers) or foreign
(tokens of another vocabulary, by its own scale of confidence). Tokens/s are counted once a hundred rounds of each place
for a request are over, however slow. A pair is one seed: the same requests with it and without it; beside it stands
what asking it in every round would cost. `no fault`: the fourth drafter is good, and the panel stands against asking
everybody: what the panel itself costs where there is nothing to do.

The same for real, on the whole system as processes: bench.misbehaving_real.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.bench.harness.intervals import Interval, ratios
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.virtual import Map, VirtualConfig, all_cores
from moot.config import option
from moot.core.speculation.drafter_selection import ALL, PAYING
from moot.core.speculation.policy import SpeculationOptions
from moot.core.types import Proposal
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import LoadClass, RandomTexts, SimulatedText
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World

BENCH = Bench("misbehaving", __doc__, measures=("moot/core", "moot/simulation"))
BOUND = 0.98
FOURTH = 3
NEVER = 1e12
FIRST_ROUNDS = 100
LIES_AFTER = 100
_FOREIGN = 1 << 24


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to misbehave: what it proposes, and how often the time of others it takes."""

    times: float = 1.0
    says: str = "right"


KINDS = {
    "bad": Kind(says="random"),
    "slow": Kind(10),
    "lying": Kind(says="lies"),
    "slow and lying": Kind(5, "lies"),
    "silent": Kind(NEVER),
    "foreign": Kind(says="foreign"),
}
"""Ways to misbehave, by name."""
NO_FAULT = "no fault"


@dataclass(frozen=True, slots=True)
class Costs:
    """`step_s`: of a step with few rows; `token_s`, `good_token_s`: a drafted token of the fourth drafter and of the
    three; `chances`: by depth, of the three and of the fourth where it is right."""

    step_s: float
    step: StepCost
    token_s: float
    good_token_s: float
    chances: Sequence[tuple[float, ...]]
    router: RouterPlan
    output_tokens: int
    shape: str


COSTS = {
    "gpu": Costs(
        0.03,
        StepCost.line(0.03, 0.0002, 64, 0.00002),
        0.003,
        0.003,
        ((0.8, 0.75, 0.7), (0.7, 0.65), (0.6,), (0.7, 0.65)),
        RouterPlan(round_s=0.0002, behind_s=0.00015, network_s=0.001),
        400,
        "tree",
    ),
    "cpu": Costs(
        0.0145,
        StepCost.line(0.0145, 0.00025, 1, 0.0003),
        0.0005,
        0.00001,
        ((0.5, 0.5, 0.5, 0.5), (0.4, 0.5), (0.3,), (0.45, 0.45)),
        RouterPlan(round_s=0.0004, behind_s=0.0003, network_s=0.0002),
        48,
        "chain",
    ),
}


class Misled:
    """Texts whose fourth drafter says what it is told to."""

    def __init__(self, texts: RandomTexts, says: str, seed: int) -> None:
        self._texts = texts
        self._says = says
        self._random = random.Random(seed)
        self._answers = itertools.count()

    def next(self) -> SimulatedText:
        text = self._texts.next()
        return text if self._says == "right" else _MisledText(text, self._says, self._random, self._answers)


class _MisledText:
    def __init__(self, text: SimulatedText, says: str, source: random.Random, answers: itertools.count[int]) -> None:
        self.prompt_token_ids, self.num_output = text.prompt_token_ids, text.num_output
        self.num_cached_tokens = text.num_cached_tokens
        self.token = text.token
        self._text = text
        self._says = says
        self._random = source
        self._answers = answers

    def propose(self, drafter: int, position: int, length: int, head: Proposal) -> Proposal:
        if drafter != FOURTH:
            return self._text.propose(drafter, position, length, head)
        if self._says == "lies" and next(self._answers) < LIES_AFTER:
            return self._text.propose(0, position, length, head)
        ids = tuple(_FOREIGN + self._random.getrandbits(16) for _ in range(length))
        if self._says == "foreign":
            return Proposal(ids, tuple(self._random.getrandbits(8) for _ in ids))
        return Proposal(ids, (255,) * length)


def simulate(
    kind: str | None, concurrency: int, rounds: int, seed: int, asks: str = PAYING, costs: str = "gpu"
) -> SimulatedOutcome:
    """About `rounds` rounds of each request after the first hundred. `kind` None: without the fourth drafter."""
    found, fourth = COSTS[costs], KINDS.get(kind or "", Kind())
    good = DraftTime(0.0, found.good_token_s)
    pools = [PoolPlan(f"good{i}", max(2, concurrency), good, noise=0.1) for i in range(FOURTH)]
    if kind is not None:
        time = DraftTime(0.0, fourth.times * found.token_s)
        pools.append(PoolPlan(kind, max(2, concurrency), time, noise=0.1))
    scenario = Scenario(
        verifier=VerifierPlan(found.step, noise=0.1),
        pools=tuple(pools),
        router=found.router,
        concurrency=concurrency,
        speculation=SpeculationOptions(asks=asks, shape=found.shape),
        # The slowest of rounds: a hundred with it have passed in any case.
        warm_up_s=FIRST_ROUNDS * (found.step_s + 0.055),
        measure_s=rounds * 1.5 * found.step_s,
    )
    texts = RandomTexts([LoadClass(output_tokens=found.output_tokens)], found.chances, 0.3, seed)
    return World(scenario, Misled(texts, fourth.says, seed)).run()


Job = tuple[str | None, int, int, int, str, str]
"""Kind, concurrency, rounds, seed, whom rounds ask, costs."""


def outcome(job: Job) -> SimulatedOutcome:
    return simulate(*job)


@dataclass(frozen=True, kw_only=True)
class Config(VirtualConfig):
    rounds: int = option(300, help="rounds of each place for a request that are counted")
    concurrency: tuple[int, ...] = option((1, 4, 16), help="requests at once")
    costs: str = option("gpu", help="what steps and drafts cost", choices=tuple(COSTS))
    keep: bool = option(False, help="keep other concurrencies from the last result")


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens/s of one kind at one concurrency, of each seed: with the panel, asking everybody (of some seeds), and
    without the drafter (where it has no fault: with it, and all asked)."""

    paying: list[float]
    everybody: list[float]
    without: list[float]

    @property
    def ratio(self) -> Interval:
        return ratios(self.paying, self.without)

    @property
    def is_reached(self) -> bool:
        return self.ratio.median >= BOUND and self.ratio.high >= BOUND


def compare(
    concurrency: int,
    rounds: int,
    seeds: Sequence[int],
    kinds: Iterable[str] = (*KINDS, NO_FAULT),
    run: Map = map,
    num_everybody: int = 3,
    costs: str = "gpu",
) -> dict[str, Found]:
    """`run`: a map, of one process or of several. `num_everybody`: seeds with which everybody is asked, too."""
    kinds = list(kinds)
    plans = {(kind, PAYING): seeds for kind in (None, *kinds)}
    plans |= {(kind, ALL): seeds if kind == NO_FAULT else seeds[:num_everybody] for kind in kinds}
    jobs = [(kind, concurrency, rounds, seed, asks, costs) for (kind, asks), some in plans.items() for seed in some]
    speeds = iter([one.tokens_per_s for one in run(outcome, jobs)])
    found = {plan: [next(speeds) for _ in some] for plan, some in plans.items()}
    return {
        kind: Found(
            found[kind, PAYING],
            found[kind, ALL],
            found[kind, ALL] if kind == NO_FAULT else found[None, PAYING],
        )
        for kind in kinds
    }


def row(kind: str, concurrency: int, one: Found) -> tuple[object, ...]:
    return (
        kind,
        concurrency,
        one.ratio.text(3),
        "reached" if one.is_reached else "missed",
        f"{ratios(one.everybody, one.without[: len(one.everybody)]).median:.3f}",
    )


HEADER = (
    "fourth drafter",
    "concurrency",
    "with / without (95 %)",
    "at least 0.98",
    "asked always",
)


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    part = "" if config.costs == "gpu" else config.costs
    kept = BENCH.kept(config, part).get("tokens_per_s", {}) if config.keep else {}
    found = {(kind, int(at)): Found(**one) for kind, places in kept.items() for at, one in places.items()}
    with all_cores() as run:
        for concurrency in config.concurrency:
            for kind, one in compare(concurrency, config.rounds, config.chosen, run=run, costs=config.costs).items():
                found[kind, concurrency] = one
                print(*row(kind, concurrency, one), sep="  ", flush=True)
    found = dict(sorted(found.items(), key=lambda plan: plan[0][1]))
    facts: dict[str, dict[int, Any]] = {}
    for (kind, concurrency), one in found.items():
        facts.setdefault(kind, {})[concurrency] = asdict(one)
    table = Table(HEADER, [row(*plan, one) for plan, one in found.items()], labels=2)
    facts_of_run = {"seeds": list(config.chosen), "tokens_per_s": facts}
    BENCH.publish(config, table, facts_of_run, HEADER[2], part=part, argv=argv)
    return 0 if all(one.is_reached for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
