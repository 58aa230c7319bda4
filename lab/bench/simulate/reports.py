"""Reports from the simulation, each a table and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.bench.harness.intervals import Interval, ratios
from lab.bench.harness.pages import PageConfig, Table
from moot.commands.common import say
from moot.config import option
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import LoadClass, RandomTexts
from moot.simulation.simulated_verifiers import BATCHINGS, VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World

MIXED = (
    LoadClass(0.5, 200, 128, 1.0),
    LoadClass(0.3, 1000, 64, 1.15),
    LoadClass(0.2, 60, 256, 0.5),
)
"""Chat, summaries of long prompts (easier to draft), free writing (harder)."""
CHANCES = (0.75,)
CORRELATION = 0.5
Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class ReportConfig(PageConfig):
    simulated_s: float = option(6.0, help="simulated seconds counted per point of a report, after as many to warm up")
    max_verifiers: int = option(1000, help="largest installation of the report `scale`")
    sim_seed: int = option(1, help="first seed of the simulated requests")
    sim_seeds: int = option(7, help="seeds per point; each table has medians and 95 % intervals over them")


@dataclass(frozen=True, slots=True)
class Report:
    """`picture`: the column that is shown."""

    table: Table
    picture: str


def base(config: ReportConfig, **changes: Any) -> Scenario:
    """One verifier, 32 requests, one drafter of four replicas; costs like a GPU's."""
    scenario = Scenario(
        verifier=VerifierPlan(StepCost.line(0.030, 0.0002, 64, 0.00005)),
        pools=(neural(4),),
        router=RouterPlan(network_s=0.001),
        concurrency=32,
        warm_up_s=config.simulated_s,
        measure_s=config.simulated_s,
    )
    return replace(scenario, **changes)


def neural(replicas: int, ahead_tokens: int = 0) -> PoolPlan:
    return PoolPlan("neural", replicas=replicas, time=DraftTime(0.0, 0.003, 0.0002), ahead_tokens=ahead_tokens)


def run(config: ReportConfig, scenario: Scenario, what: str, seeds: int | None = None) -> list[SimulatedOutcome]:
    """One outcome per seed."""
    begin = time.monotonic()
    outcomes: list[SimulatedOutcome] = []
    for seed in range(config.sim_seed, config.sim_seed + (seeds or config.sim_seeds)):
        texts = RandomTexts(MIXED, [CHANCES] * len(scenario.pools), CORRELATION, seed)
        outcomes.append(World(scenario, texts).run())
    say(f"{what}: {speeds(outcomes).text(0)} tokens/s ({time.monotonic() - begin:.0f} s)")
    return outcomes


def speeds(outcomes: Sequence[SimulatedOutcome]) -> Interval:
    return Interval.of([one.tokens_per_s for one in outcomes])


def against(outcomes: Sequence[SimulatedOutcome], others: Sequence[SimulatedOutcome]) -> Interval:
    """Of tokens/s, seed by seed."""
    return ratios([one.tokens_per_s for one in outcomes], [one.tokens_per_s for one in others])


MEDIANS: Mapping[str, tuple[str, str]] = {
    "mean K": ("mean_length", ".1f"),
    "tokens/round": ("tokens_per_round", ".2f"),
    "drafters busy": ("drafter_utilisation", ".0%"),
    "verifiers busy": ("verifier_utilisation", ".0%"),
    "router busy": ("router_utilisation", ".0%"),
    "round ms": ("round_ms", ".0f"),
    "answers from ahead": ("from_ahead", ".0%"),
    "requests moved": ("num_moves", ".0f"),
    "late proposals per round": ("late_per_round", ".4f"),
}
"""Columns that are the median of an outcome's figure: its name and how it is written."""


def medians(outcomes: Sequence[SimulatedOutcome], titles: Sequence[str]) -> list[str]:
    return [format(middle(outcomes, MEDIANS[title][0]), MEDIANS[title][1]) for title in titles]


def middle(outcomes: Sequence[SimulatedOutcome], figure: str) -> float:
    return Interval.of([getattr(one, figure) for one in outcomes]).median


def drafters(config: ReportConfig) -> Report:
    """Goodput against drafter replicas per verifier, and with several drafters that vote."""
    verifiers, rows = 2, []
    titles = ("mean K", "tokens/round", "drafters busy", "verifiers busy")
    silent = base(config, num_verifiers=verifiers, router=RouterPlan(network_s=0.001, num_speculative_tokens=0))
    off = run(config, silent, "no drafting")
    for count, replicas in [(1, replicas) for replicas in (1, 2, 4, 8, 16)] + [(2, 4), (3, 4)]:
        pools = tuple(replace(neural(replicas), drafter_id=f"neural-{index}") for index in range(count))
        scenario = base(config, num_verifiers=verifiers, pools=pools)
        found = run(config, scenario, f"{count} drafters of {replicas} replicas")
        speed = f"{speeds(found).median / verifiers:,.0f}"
        rows.append([count, f"{replicas / verifiers:g}", speed, against(found, off).text(), *medians(found, titles)])
    header = ("drafters that vote", "replicas of each per verifier", "tokens/s per verifier", "of no drafting (95 %)")
    return Report(Table((*header, *titles), rows, labels=2), header[3])


def router(config: ReportConfig) -> Report:
    """Where one router process saturates."""
    rows = []
    titles = ("router busy", "round ms", "verifiers busy")
    half = config.simulated_s / 2
    for count in (1, 4, 8, 12, 16):
        scenario = base(config, num_verifiers=count, pools=(neural(4 * count),), warm_up_s=half, measure_s=half)
        found = run(config, scenario, f"{count} verifiers, one router")
        speed = speeds(found)
        each = f"{speed.median / count:,.0f}"
        rows.append([count, count * 32, speed.text(0), each, *medians(found, titles)])
    header = ("verifiers", "requests", "tokens/s (95 %)", "per verifier", *titles)
    return Report(Table(header, rows), header[2])


def overlap(config: ReportConfig) -> Report:
    """What draft-ahead and the ways to put batches together bring."""
    titles = ("answers from ahead", "mean K")
    found: dict[tuple[int, str, int], list[SimulatedOutcome]] = {}
    for concurrency in (1, 16, 32):
        # As many tokens of few requests as of many.
        seconds = config.simulated_s * 32 / max(concurrency, 3)
        for ahead in (0, 8):
            for batching in BATCHINGS if concurrency > 1 else BATCHINGS[:1]:
                scenario = base(
                    config,
                    concurrency=concurrency,
                    warm_up_s=seconds,
                    measure_s=seconds,
                    pools=(neural(4, ahead),),
                    verifier=replace(base(config).verifier, batching=batching),
                )
                what = f"{concurrency} requests, {batching}, ahead {ahead}"
                found[concurrency, batching, ahead] = run(config, scenario, what)
    ratio = {plan: against(outcomes, found[plan[0], BATCHINGS[0], 0]) for plan, outcomes in found.items()}
    rows = [
        [*plan[:2], "yes" if plan[2] else "no", f"{speeds(one).median:,.0f}", ratio[plan].text(), *medians(one, titles)]
        for plan, one in found.items()
    ]
    header = ("requests", "batches", "draft-ahead", "tokens/s", "of `ready`, no (95 %)", *titles)
    return Report(Table(header, rows, labels=3), header[4])


def loss(config: ReportConfig) -> Report:
    """What losing a tenth of the drafters, or of the verifiers, costs: beside the same seed without a loss."""
    verifiers, rows = 10, []
    titles = ("requests moved", "late proposals per round")
    fail_at, span = config.simulated_s, 1.5 * config.simulated_s
    whole: dict[int, list[SimulatedOutcome]] = {}
    for replicas, name, drafters_lost, verifiers_lost in (
        (4, "nothing", 0.0, 0.0),
        (4, "10 % of the drafters", 0.1, 0.0),
        (4, "10 % of the verifiers", 0.0, 0.1),
        (1, "nothing", 0.0, 0.0),
        (1, "10 % of the drafters", 0.1, 0.0),
    ):
        scenario = base(
            config,
            num_verifiers=verifiers,
            num_routers=2,
            concurrency=16,
            pools=(neural(replicas * verifiers),),
            warm_up_s=0.0,
            measure_s=span,
            fail_at_s=fail_at,
            failed_drafters=drafters_lost,
            failed_verifiers=verifiers_lost,
        )
        what = f"{name}, {replicas} drafters per verifier"
        found = run(config, scenario, what)
        before = Interval.of([mean(one.over_time, fail_at / 2, fail_at) for one in found]).median
        parts = [
            ratios(
                *([mean(one.over_time, *part) for one in side] for side in (found, whole.setdefault(replicas, found)))
            ).text()
            for part in ((fail_at, fail_at + 0.5), (fail_at + 0.5, span))
        ]
        rows.append([what, f"{before:,.0f}", *parts, *medians(found, titles)])
    header = ("lost", "tokens/s before", "first half second, of no loss (95 %)", "after it, of no loss (95 %)", *titles)
    return Report(Table(header, rows), header[2])


def scale(config: ReportConfig) -> Report:
    """Large installations: the same per verifier, and how long the simulation takes. The largest with one seed."""
    rows = []
    for count in [n for n in (10, 100, 1000) if n <= config.max_verifiers] or [config.max_verifiers]:
        scenario = base(
            config,
            num_verifiers=count,
            num_routers=max(1, count // 5),
            concurrency=8,
            pools=(neural(2 * count),),
            warm_up_s=1.0,
            measure_s=1.0,
        )
        seeds = {10: config.sim_seeds, 100: 3}.get(count, 1)
        begin = time.monotonic()
        found = run(config, scenario, f"{count} verifiers", seeds)
        took = (time.monotonic() - begin) / seeds
        each = Interval.of([one.tokens_per_s / count for one in found])
        rows.append([count, count * 8, seeds, f"{speeds(found).median:,.0f}", each.text(0), f"{took:.0f}"])
    header = ("verifiers", "requests", "seeds", "tokens/s", "per verifier (lowest to highest)", "one seed takes, s")
    return Report(Table(header, rows), header[4])


def mean(line: Line, begin: float, end: float) -> float:
    chosen = [speed for at, speed in line if begin < at <= end]
    return sum(chosen) / len(chosen)


REPORTS: Mapping[str, Callable[[ReportConfig], Report]] = {
    "drafters": drafters,
    "router": router,
    "overlap": overlap,
    "loss": loss,
    "scale": scale,
}
