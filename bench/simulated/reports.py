"""Reports from the simulation, each a table and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.report import publish
from moot.commands.common import say
from moot.config import option
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.requests import RouterPlan
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
    simulated_s: float = option(8.0, help="simulated seconds counted per point of a report, after as many to warm up")
    max_verifiers: int = option(1000, help="largest installation of the report `scale`")
    sim_seed: int = option(1, help="seed of the simulated requests")


def base(config: ReportConfig, **changes: Any) -> Scenario:
    """One verifier, 32 requests, one drafter of four replicas; costs like a GPU's."""
    scenario = Scenario(
        verifier=VerifierPlan(StepCost.line(0.030, 0.0002, 64, 0.00005)),
        pools=(PoolPlan("neural", replicas=4, time=DraftTime(0.0, 0.003)),),
        router=RouterPlan(network_s=0.001),
        concurrency=32,
        warm_up_s=config.simulated_s,
        measure_s=config.simulated_s,
    )
    return replace(scenario, **changes)


def run(config: ReportConfig, scenario: Scenario, what: str, classes: Sequence[LoadClass] = MIXED) -> Outcome:
    begin = time.monotonic()
    texts = RandomTexts(classes, [CHANCES] * len(scenario.pools), CORRELATION, config.sim_seed)
    told = [begin]

    def progress(part: float) -> None:
        if time.monotonic() - told[0] > 10:
            told[0] = time.monotonic()
            say(f"  {what}: {part:.0%}")

    outcome = World(scenario, texts).run(progress)
    say(f"{what}: {outcome.tokens_per_s:,.0f} tokens/s ({time.monotonic() - begin:.1f} s)")
    return outcome


def drafters(config: ReportConfig) -> None:
    """Goodput against drafter replicas per verifier."""
    verifiers, rows, points = 4, [], []
    off = run(
        config,
        base(config, num_verifiers=verifiers, router=RouterPlan(network_s=0.001, num_speculative_tokens=0)),
        "off",
    )
    for replicas in (1, 2, 4, 8, 16, 32):
        pools = (PoolPlan("neural", replicas=replicas, time=DraftTime(0.0, 0.003, 0.0002)),)
        found = run(config, base(config, num_verifiers=verifiers, pools=pools), f"{replicas} replicas")
        points.append((replicas / verifiers, found.tokens_per_s / verifiers))
        rows.append(
            (
                f"{replicas / verifiers:g}",
                f"{found.tokens_per_s / verifiers:,.0f}",
                f"{found.tokens_per_s / off.tokens_per_s:.2f}",
                f"{found.mean_length:.1f}",
                f"{found.tokens_per_round:.2f}",
                f"{found.drafter_utilisation:.0%}",
                f"{found.verifier_utilisation:.0%}",
            )
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.semilogx([x for x, _ in points], [y for _, y in points], "o-", base=2, label="drafting")
        axes.axhline(off.tokens_per_s / verifiers, color="grey", label="no drafting")
        axes.set(xlabel="drafter replicas per verifier", ylabel="tokens/s per verifier", ylim=(0, None))
        axes.legend()

    header = (
        "drafters per verifier",
        "tokens/s per verifier",
        "of no drafting",
        "mean K",
        "tokens/round",
        "drafters busy",
        "verifiers busy",
    )
    publish(
        "simulate_drafters",
        header,
        rows,
        {"points": points, "off": off.tokens_per_s / verifiers},
        draw,
        script="simulate",
    )


def router(config: ReportConfig) -> None:
    """Where one router process saturates."""
    rows, points = [], []
    for count in (1, 2, 4, 8, 16, 24, 32):
        pools = (PoolPlan("neural", replicas=4 * count, time=DraftTime(0.0, 0.003)),)
        found = run(config, base(config, num_verifiers=count, pools=pools), f"{count} verifiers, one router")
        points.append((count, found.tokens_per_s, found.router_utilisation))
        rows.append(
            (
                count,
                count * 32,
                f"{found.tokens_per_s:,.0f}",
                f"{found.tokens_per_s / count:,.0f}",
                f"{found.router_utilisation:.0%}",
                f"{found.round_ms:.0f}",
                f"{found.verifier_utilisation:.0%}",
            )
        )

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-")
        left.plot([x for x, _, _ in points], [x * points[0][1] for x, _, _ in points], "--", color="grey")
        left.set(xlabel="verifiers behind one router process", ylabel="tokens/s")
        right.plot([x for x, _, _ in points], [100 * y for _, _, y in points], "o-")
        right.set(xlabel="verifiers behind one router process", ylabel="router CPU, % of a core")

    header = ("verifiers", "requests", "tokens/s", "per verifier", "router busy", "round ms", "verifiers busy")
    publish("simulate_router", header, rows, {"points": points}, draw, script="simulate")


def overlap(config: ReportConfig) -> None:
    """What draft-ahead and the ways to put batches together bring."""
    rows, bars = [], []
    for concurrency in (1, 16):
        reference = 0.0
        for ahead in (0, 8):
            for batching in BATCHINGS:
                pools = (PoolPlan("neural", replicas=4, time=DraftTime(0.0, 0.003), ahead_tokens=ahead),)
                plan = replace(base(config).verifier, batching=batching)
                name = f"{concurrency} requests, {batching}, ahead {ahead}"
                found = run(config, base(config, concurrency=concurrency, pools=pools, verifier=plan), name)
                reference = reference or found.tokens_per_s
                bars.append((name, found.tokens_per_s / reference))
                rows.append(
                    (
                        concurrency,
                        batching,
                        "yes" if ahead else "no",
                        f"{found.tokens_per_s:,.0f}",
                        f"{found.tokens_per_s / reference:.2f}",
                        f"{found.from_ahead:.0%}",
                        f"{found.round_ms:.0f}",
                        f"{found.mean_length:.1f}",
                    )
                )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.barh([name for name, _ in bars][::-1], [value for _, value in bars][::-1])
        axes.set(xlabel="tokens/s, of taking what is ready without drafting ahead")

    header = ("requests", "batches", "draft-ahead", "tokens/s", "ratio", "answers from ahead", "round ms", "mean K")
    publish("simulate_overlap", header, rows, {"bars": bars}, draw, script="simulate")


def loss(config: ReportConfig) -> None:
    """What losing a tenth of the drafters, or of the verifiers, costs."""
    verifiers, rows, lines = 10, [], {}
    span = 3 * config.simulated_s
    for name, drafters_lost, verifiers_lost, replicas in (
        ("none, 4 drafters per verifier", 0.0, 0.0, 4),
        ("10 % of the drafters, 4 per verifier", 0.1, 0.0, 4),
        ("none, 1 drafter per verifier", 0.0, 0.0, 1),
        ("10 % of the drafters, 1 per verifier", 0.1, 0.0, 1),
        ("10 % of the verifiers", 0.0, 0.1, 4),
    ):
        pools = (PoolPlan("neural", replicas=replicas * verifiers, time=DraftTime(0.0, 0.003, 0.0002)),)
        scenario = base(
            config,
            num_verifiers=verifiers,
            num_routers=4,
            pools=pools,
            warm_up_s=0.0,
            measure_s=span,
            fail_at_s=2 * span / 3,
            failed_drafters=drafters_lost,
            failed_verifiers=verifiers_lost,
        )
        found = run(config, scenario, name)
        lines[name] = found.over_time
        before = mean(found.over_time, span / 3, 2 * span / 3)
        dip = min(speed for at, speed in found.over_time if 2 * span / 3 < at <= 2 * span / 3 + 1.0)
        after = mean(found.over_time, 2 * span / 3 + 1.0, span)
        rows.append(
            (
                name,
                f"{before:,.0f}",
                f"{dip / before - 1:+.0%}",
                f"{after / before - 1:+.1%}",
                found.num_moves,
                f"{found.late_per_round:.4f}",
            )
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, line in lines.items():
            axes.plot([at for at, _ in line], [speed for _, speed in line], label=name)
        axes.axvline(2 * span / 3, color="grey", linestyle="--")
        axes.set(xlabel="seconds", ylabel="tokens/s", ylim=(0, None))
        axes.legend(fontsize=8)

    header = (
        "lost",
        "tokens/s before",
        "worst quarter second",
        "from one second later",
        "requests moved",
        "late proposals per round",
    )
    publish("simulate_loss", header, rows, {"over_time": lines}, draw, script="simulate")


def scale(config: ReportConfig) -> None:
    """Large installations: the same per verifier, and how long the simulation takes."""
    rows, points = [], []
    for count in [n for n in (10, 100, 1000) if n <= config.max_verifiers] or [config.max_verifiers]:
        scenario = base(
            config,
            num_verifiers=count,
            num_routers=max(1, count // 5),
            concurrency=16,
            pools=(PoolPlan("neural", replicas=2 * count, time=DraftTime(0.0, 0.003)),),
            warm_up_s=1.5,
            measure_s=2.0,
        )
        begin = time.monotonic()
        found = run(config, scenario, f"{count} verifiers")
        took = time.monotonic() - begin
        points.append((count, found.tokens_per_s, took))
        rows.append(
            (count, count * 16, f"{found.tokens_per_s:,.0f}", f"{found.tokens_per_s / count:,.0f}", f"{took:.0f}")
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.loglog([x for x, _, _ in points], [y for _, y, _ in points], "o-")
        axes.set(xlabel="verifiers", ylabel="tokens/s")

    publish(
        "simulate_scale",
        ("verifiers", "requests", "tokens/s", "per verifier", "simulated in s"),
        rows,
        {"points": points},
        draw,
        script="simulate",
    )


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
