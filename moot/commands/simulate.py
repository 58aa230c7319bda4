"""`moot simulate`: what an installation of given sizes and costs would deliver, in simulated time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moot.commands.common import say, table
from moot.config import load_config
from moot.core.errors import ConfigError
from moot.core.options import Options, option, option_of, part
from moot.core.speculation.policy import SpeculationOptions
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan, chunk_of
from moot.simulation.simulated_texts import LoadClass, RandomTexts
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Course, Scenario, SimulatedOutcome, World

SAY_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Options):
    verifiers: int = option(4, help="number of verifiers", minimum=1)
    routers: int = option(1, help="router processes, one core each", minimum=1)
    drafters: int = option(1, help="pools of drafters that vote, all alike", minimum=0)
    replicas: int = option(4, help="replicas of each pool of drafters", minimum=1)
    concurrency: tuple[int, ...] = option(
        (1, 4, 16, 64), help="requests under way per verifier; one row of the table for each number", minimum=1
    )
    load: tuple[str, ...] = option(
        ("1:200:128:1",),
        help="classes of requests as SHARE:PROMPT_TOKENS:OUTPUT_TOKENS:SKILL; skill multiplies acceptance",
    )
    acceptance: tuple[float, ...] = option(
        (0.75,),
        help="chance that a draft token is right if those before it are, by depth; the last for all further",
        minimum=0,
        maximum=1,
    )
    place: str = option_of(PoolPlan, "place")
    local_acceptance: tuple[float, ...] = option(
        (),
        help="acceptance by depth of one more drafter, in the verifier's process; none: there is none",
        minimum=0,
        maximum=1,
    )
    correlation: float = option(0.5, help="part of the positions at which all drafters are right or wrong together")

    verify_ms: float = option(30.0, help="milliseconds of a verify step up to --free-rows rows", above=0)
    verify_row_ms: float = option(0.2, help="milliseconds of each further row")
    free_rows: int = option(64, help="rows of a verify step that cost nothing more")
    prefill_token_ms: float = option(0.05, help="milliseconds of a prompt token in a step")
    draft_ms: float = option(0.0, help="milliseconds of a draft before its first token", minimum=0)
    draft_token_ms: float = option(
        3.0, help="milliseconds of a drafted token, for all requests of a batch together", minimum=0
    )
    draft_request_ms: float = option(0.0, help="milliseconds that each further request of a batch adds")
    router_round_ms: float = option(0.35, help="milliseconds of router CPU per round", minimum=0)
    network_ms: float = option(1.0, help="milliseconds of a message from one process to another", minimum=0)

    num_speculative_tokens: int | None = option(None, help="K of every round; 0: no drafting; none: the policy decides")
    max_speculative_tokens: int = option_of(
        SpeculationOptions, "num_speculative_tokens", help="greatest K of the policy"
    )
    shape: str = option_of(SpeculationOptions, "shape")
    draft_ahead_tokens: int = option(0, help="tokens that an idle drafter goes on past its proposal")
    batching: str = option_of(VerifierPlan, "batching")
    waits: bool = option_of(VerifierPlan, "waits")
    course: Course = part(Course)
    seed: int = option(1, help="seed of the requests; the same seed gives the same table")
    picture: Path | None = option(None, help="also draw tokens/s against concurrency into this PNG")

    def check_together(self) -> None:
        if not self.concurrency or not self.acceptance:
            raise ConfigError("concurrency and acceptance need at least one number")

    def classes(self) -> list[LoadClass]:
        """Raises ConfigError for an entry of `load` that is none."""
        try:
            parts = [entry.split(":") for entry in self.load]
            found = [LoadClass(float(a), int(b), int(c), float(d)) for a, b, c, d in parts]
        except ValueError as error:
            raise ConfigError("load is SHARE:PROMPT_TOKENS:OUTPUT_TOKENS:SKILL, for example 1:200:128:1") from error
        if not found or any(one.share <= 0 or one.prompt_tokens < 1 or one.output_tokens < 1 for one in found):
            raise ConfigError("load needs classes with a share above 0 and at least one token")
        return found

    def _pools(self, time_of: DraftTime) -> tuple[PoolPlan, ...]:
        chunk = chunk_of(self.verify_ms, self.draft_token_ms)
        pools = [
            PoolPlan(f"drafter-{index}", self.replicas, time_of, self.draft_ahead_tokens, place=self.place, chunk=chunk)
            for index in range(self.drafters)
        ]
        return (*pools, *([PoolPlan("local", place="verifier")] if self.local_acceptance else []))

    def scenario(self, concurrency: int) -> Scenario:
        ms = 1e-3
        cost = StepCost.line(self.verify_ms * ms, self.verify_row_ms * ms, self.free_rows, self.prefill_token_ms * ms)
        time_of = DraftTime(self.draft_ms * ms, self.draft_token_ms * ms, self.draft_request_ms * ms)
        return Scenario(
            verifier=VerifierPlan(cost, batching=self.batching, waits=self.waits, max_num_seqs=max(64, concurrency)),
            pools=self._pools(time_of),
            router=RouterPlan.of_round(self.router_round_ms * ms, self.network_ms * ms, self.num_speculative_tokens),
            num_verifiers=self.verifiers,
            num_routers=self.routers,
            concurrency=concurrency,
            speculation=SpeculationOptions(num_speculative_tokens=self.max_speculative_tokens, shape=self.shape),
            **asdict(self.course),
        )


HEADER = (
    *("concurrency", "tokens/s", "per request", "tokens/round", "mean K", "round ms"),
    *("router busy", "drafters busy", "verifiers busy"),
)


def run(argv: Sequence[str]) -> int:
    config = load_config(
        SimulateConfig,
        argv,
        prog="moot simulate",
        description="Routers, drafters and verifiers in simulated time, with Moot's own policies, vote and scheduler: "
        "tokens per second, and who is busy, for each concurrency.",
        example="moot simulate --verifiers 8 --routers 2 --replicas 16 --concurrency 4,16,64 --verify-ms 30 "
        "--draft-token-ms 3 --acceptance 0.8,0.7,0.6 --picture plan.png",
    )
    draw = _picture_maker() if config.picture is not None else None
    outcomes = [(concurrency, simulate(config, concurrency)) for concurrency in config.concurrency]
    print(table(HEADER, [row(config, concurrency, outcome) for concurrency, outcome in outcomes]))
    if draw is not None and config.picture is not None:
        draw([(concurrency, outcome.tokens_per_s) for concurrency, outcome in outcomes], config.picture)
        say(f"picture: {config.picture}")
    return 0


def simulate(config: SimulateConfig, concurrency: int) -> SimulatedOutcome:
    chances = [config.acceptance] * config.drafters + ([config.local_acceptance] if config.local_acceptance else [])
    texts = RandomTexts(config.classes(), chances, config.correlation, config.seed)
    told = time.monotonic()

    def progress(part: float) -> None:
        nonlocal told
        if time.monotonic() - told > SAY_EVERY_S:
            told = time.monotonic()
            say(f"concurrency {concurrency}: {part:.0%} of the simulated time")

    return World(config.scenario(concurrency), texts).run(progress)


def row(config: SimulateConfig, concurrency: int, found: SimulatedOutcome) -> list[str]:
    return [
        str(concurrency),
        f"{found.tokens_per_s:,.0f}",
        f"{found.tokens_per_s / config.verifiers / concurrency:.1f}",
        f"{found.tokens_per_round:.2f}",
        f"{found.mean_length:.1f}",
        f"{found.round_ms:.1f}",
        f"{found.router_utilisation:.0%}",
        f"{found.drafter_utilisation:.0%}",
        f"{found.verifier_utilisation:.0%}",
    ]


def _picture_maker() -> Any:
    """Raises ConfigError where matplotlib is not installed, before anything is simulated."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from error

    def draw(points: Sequence[tuple[int, float]], path: Path) -> None:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([x for x, _ in points], [y for _, y in points], "o-")
        axes.set(xlabel="requests under way per verifier", ylabel="tokens/s", ylim=(0, None))
        figure.savefig(path, dpi=120)

    return draw
