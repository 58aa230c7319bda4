"""Reports from the simulation, each a table and a picture."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.bench.intervals import Interval, ratios
from lab.bench.report import publish
from moot.commands.common import say
from moot.config import option
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.router_plan import RouterPlan
from moot.simulation.texts import LoadClass, RandomTexts
from moot.simulation.verifiers import BATCHINGS, VerifierPlan
from moot.simulation.world import Outcome, Scenario, World

MIXED = (
    LoadClass(0.5, 200, 128, 1.0),
    LoadClass(0.3, 1000, 64, 1.15),
    LoadClass(0.2, 60, 256, 0.5),
)
"""Chat, summaries of long prompts (easier to draft), free writing (harder)."""
CHANCES = (0.75,)
CORRELATION = 0.5


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    simulated_s: float = option(6.0, help="simulated seconds counted per point of a report, after as many to warm up")
    max_verifiers: int = option(1000, help="largest installation of the report `scale`")
    sim_seed: int = option(1, help="first seed of the simulated requests")
    sim_seeds: int = option(7, help="seeds per point; each table has medians and 95 % intervals over them")


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


def run(config: ReportConfig, scenario: Scenario, what: str, seeds: int | None = None) -> list[Outcome]:
    """One outcome per seed."""
    begin = time.monotonic()
    told = [begin]
    outcomes: list[Outcome] = []
    count = seeds or config.sim_seeds

    def progress(part: float) -> None:
        if time.monotonic() - told[0] > 10:
            told[0] = time.monotonic()
            say(f"  {what}: {(len(outcomes) + part) / count:.0%}")

    for seed in range(config.sim_seed, config.sim_seed + count):
        texts = RandomTexts(MIXED, [CHANCES] * len(scenario.pools), CORRELATION, seed)
        outcomes.append(World(scenario, texts).run(progress))
    say(f"{what}: {speeds(outcomes).text(0)} tokens/s ({time.monotonic() - begin:.0f} s)")
    return outcomes


def speeds(outcomes: Sequence[Outcome]) -> Interval:
    return over(outcomes, lambda one: one.tokens_per_s)


def over(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> Interval:
    return Interval.of([value(one) for one in outcomes])


def against(outcomes: Sequence[Outcome], others: Sequence[Outcome]) -> Interval:
    """Of tokens/s, seed by seed."""
    return ratios([one.tokens_per_s for one in outcomes], [one.tokens_per_s for one in others])


def drafters(config: ReportConfig) -> None:
    """Goodput against drafter replicas per verifier, and with several drafters that vote."""
    verifiers, rows, points = 2, [], []
    off = run(
        config,
        base(config, num_verifiers=verifiers, router=RouterPlan(network_s=0.001, num_speculative_tokens=0)),
        "no drafting",
    )
    electorates = [(1, replicas) for replicas in (1, 2, 4, 8, 16)] + [(2, 4), (3, 4)]
    for count, replicas in electorates:
        pools = tuple(replace(neural(replicas), drafter_id=f"neural-{index}") for index in range(count))
        scenario = base(config, num_verifiers=verifiers, pools=pools)
        found = run(config, scenario, f"{count} drafters of {replicas} replicas")
        ratio = against(found, off)
        if count == 1:
            points.append((replicas / verifiers, ratio.median, ratio.low, ratio.high))
        rows.append(
            (
                count,
                f"{replicas / verifiers:g}",
                f"{speeds(found).median / verifiers:,.0f}",
                ratio.text(),
                f"{over(found, lambda one: one.mean_length).median:.1f}",
                f"{over(found, lambda one: one.tokens_per_round).median:.2f}",
                f"{over(found, lambda one: one.drafter_utilisation).median:.0%}",
                f"{over(found, lambda one: one.verifier_utilisation).median:.0%}",
            )
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places, middle, low, high = zip(*points, strict=True)
        axes.semilogx(places, middle, "o-", base=2, label="drafting, one drafter")
        axes.fill_between(places, low, high, alpha=0.3)
        axes.axhline(1.0, color="grey", label="no drafting")
        axes.set(xlabel="drafter replicas per verifier", ylabel="tokens/s, of no drafting", ylim=(0, None))
        axes.legend()

    header = (
        *("drafters that vote", "replicas of each per verifier", "tokens/s per verifier", "of no drafting (95 %)"),
        *("mean K", "tokens/round", "drafters busy", "verifiers busy"),
    )
    publish("simulate_drafters", header, rows, {"seeds": config.sim_seeds, "points": points}, draw, script="simulate")


def router(config: ReportConfig) -> None:
    """Where one router process saturates."""
    rows, points = [], []
    for count in (1, 4, 8, 12, 16):
        half = config.simulated_s / 2
        scenario = base(config, num_verifiers=count, pools=(neural(4 * count),), warm_up_s=half, measure_s=half)
        found = run(config, scenario, f"{count} verifiers, one router")
        speed, busy = speeds(found), over(found, lambda one: one.router_utilisation)
        points.append((count, speed.median, busy.median))
        rows.append(
            (
                count,
                count * 32,
                speed.text(0),
                f"{speed.median / count:,.0f}",
                f"{busy.median:.0%}",
                f"{over(found, lambda one: one.round_ms).median:.0f}",
                f"{over(found, lambda one: one.verifier_utilisation).median:.0%}",
            )
        )

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-")
        left.plot([x for x, _, _ in points], [x * points[0][1] for x, _, _ in points], "--", color="grey")
        left.set(xlabel="verifiers behind one router process", ylabel="tokens/s")
        right.plot([x for x, _, _ in points], [100 * y for _, _, y in points], "o-")
        right.set(xlabel="verifiers behind one router process", ylabel="router CPU, % of a core")

    header = ("verifiers", "requests", "tokens/s (95 %)", "per verifier", "router busy", "round ms", "verifiers busy")
    publish("simulate_router", header, rows, {"seeds": config.sim_seeds, "points": points}, draw, script="simulate")


def overlap(config: ReportConfig) -> None:
    """What draft-ahead and the ways to put batches together bring."""
    found = {
        (concurrency, batching, ahead): run(
            config,
            base(
                config,
                concurrency=concurrency,
                # As many tokens of few requests as of many.
                warm_up_s=config.simulated_s * 32 / max(concurrency, 3),
                measure_s=config.simulated_s * 32 / max(concurrency, 3),
                pools=(neural(4, ahead),),
                verifier=replace(base(config).verifier, batching=batching),
            ),
            f"{concurrency} requests, {batching}, ahead {ahead}",
        )
        for concurrency in (1, 16, 32)
        for ahead in (0, 8)
        for batching in (BATCHINGS if concurrency > 1 else BATCHINGS[:1])
    }
    ratio = {plan: against(outcomes, found[plan[0], BATCHINGS[0], 0]) for plan, outcomes in found.items()}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        plans = list(ratio)[::-1]
        middle = [ratio[plan].median for plan in plans]
        below = [ratio[plan].median - ratio[plan].low for plan in plans]
        above = [ratio[plan].high - ratio[plan].median for plan in plans]
        axes.barh([f"{plan[0]} requests, {plan[1]}, ahead {plan[2]}" for plan in plans], middle, xerr=[below, above])
        axes.set(xlabel="tokens/s, of taking what is ready without drafting ahead")

    rows = [
        (
            concurrency,
            batching,
            "yes" if ahead else "no",
            f"{speeds(outcomes).median:,.0f}",
            ratio[concurrency, batching, ahead].text(),
            f"{over(outcomes, lambda one: one.from_ahead).median:.0%}",
            f"{over(outcomes, lambda one: one.round_ms).median:.0f}",
            f"{over(outcomes, lambda one: one.requests_per_step).median:.1f}",
            f"{over(outcomes, lambda one: one.mean_length).median:.1f}",
        )
        for (concurrency, batching, ahead), outcomes in found.items()
    ]
    header = (
        *("requests", "batches", "draft-ahead", "tokens/s", "of `ready`, no (95 %)", "answers from ahead"),
        *("round ms", "requests/step", "mean K"),
    )
    facts = {"seeds": config.sim_seeds, "ratios": {str(plan): asdict(one) for plan, one in ratio.items()}}
    publish("simulate_overlap", header, rows, facts, draw, script="simulate")


def loss(config: ReportConfig) -> None:
    """What losing a tenth of the drafters, or of the verifiers, costs: beside the same seed without a loss."""
    verifiers, rows, lines = 10, [], {}
    fail_at = config.simulated_s
    span = 1.5 * config.simulated_s
    for replicas in (4, 1):
        cases = [("nothing", 0.0, 0.0), ("10 % of the drafters", 0.1, 0.0)]
        if replicas == 4:
            cases.append(("10 % of the verifiers", 0.0, 0.1))
        whole: list[Outcome] = []
        for name, drafters_lost, verifiers_lost in cases:
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
            whole = whole or found
            lines[what] = found[0].over_time

            def part(begin: float, end: float, found: list[Outcome] = found, whole: list[Outcome] = whole) -> str:
                pairs = zip(found, whole, strict=True)
                return Interval.of(
                    [mean(one.over_time, begin, end) / mean(other.over_time, begin, end) for one, other in pairs]
                ).text()

            rows.append(
                (
                    what,
                    f"{statistics.median(mean(one.over_time, fail_at / 2, fail_at) for one in found):,.0f}",
                    part(fail_at, fail_at + 0.5),
                    part(fail_at + 0.5, span),
                    f"{over(found, lambda one: one.num_moves).median:.0f}",
                    f"{over(found, lambda one: one.late_per_round).median:.4f}",
                )
            )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, line in lines.items():
            axes.plot([at for at, _ in line], [speed for _, speed in line], label=name)
        axes.axvline(fail_at, color="grey", linestyle="--")
        axes.set(xlabel="seconds", ylabel="tokens/s", ylim=(0, None))
        axes.legend(fontsize=8)

    header = (
        *("lost", "tokens/s before", "first half second, of no loss (95 %)", "after it, of no loss (95 %)"),
        *("requests moved", "late proposals per round"),
    )
    publish("simulate_loss", header, rows, {"seeds": config.sim_seeds, "over_time": lines}, draw, script="simulate")


def scale(config: ReportConfig) -> None:
    """Large installations: the same per verifier, and how long the simulation takes. The largest with one seed."""
    rows, points = [], []
    sizes = [n for n in (10, 100, 1000) if n <= config.max_verifiers] or [config.max_verifiers]
    for count in sizes:
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
        speed = speeds(found)
        points.append((count, speed.median, took))
        each = Interval(speed.median / count, speed.low / count, speed.high / count)
        rows.append((count, count * 8, seeds, f"{speed.median:,.0f}", each.text(0), f"{took:.0f}"))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.loglog([x for x, _, _ in points], [y for _, y, _ in points], "o-")
        axes.set(xlabel="verifiers", ylabel="tokens/s")

    header = ("verifiers", "requests", "seeds", "tokens/s", "per verifier (lowest to highest)", "one seed takes, s")
    publish("simulate_scale", header, rows, {"points": points}, draw, script="simulate")


def mean(line: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    chosen = [speed for at, speed in line if begin < at <= end]
    return sum(chosen) / len(chosen)


REPORTS: Mapping[str, Callable[[ReportConfig], None]] = {
    "drafters": drafters,
    "router": router,
    "overlap": overlap,
    "loss": loss,
    "scale": scale,
}
