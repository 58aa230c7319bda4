"""The worlds of lab/bench/misbehaving.py: three good drafters, and a fourth that misbehaves in one of several ways."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from moot.core.speculation.panel import PAYING
from moot.core.types import Proposal
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.router_plan import RouterPlan
from moot.simulation.texts import LoadClass, RandomTexts, Text
from moot.simulation.verifiers import VerifierPlan
from moot.simulation.world import Outcome, Scenario, World

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

    def next(self) -> Text:
        text = self._texts.next()
        return text if self._says == "right" else _MisledText(text, self._says, self._random, self._answers)


class _MisledText:
    def __init__(self, text: Text, says: str, source: random.Random, answers: itertools.count[int]) -> None:
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
) -> Outcome:
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
        asks=asks,
        shape=found.shape,
        # The slowest of rounds: a hundred with it have passed in any case.
        warm_up_s=FIRST_ROUNDS * (found.step_s + 0.055),
        measure_s=rounds * 1.5 * found.step_s,
    )
    texts = RandomTexts([LoadClass(output_tokens=found.output_tokens)], found.chances, 0.3, seed)
    return World(scenario, Misled(texts, fourth.says, seed)).run()
