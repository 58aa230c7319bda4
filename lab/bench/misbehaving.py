"""What a drafter that misbehaves costs after its first hundred rounds: three good drafters with it and without it.

    python -m bench.misbehaving [--costs gpu] [--concurrency 1,4,16] [--seeds 7] [--rounds 300] [--keep]
    python -m bench.misbehaving --real [--faults lie,delay:0.05,freeze] [--concurrency 4] [--repetitions 7]

In virtual time with scripted costs, like a GPU's (a step takes 30 ms up to 64 rows and 0.2 ms for each further one, a
drafted token 3 ms) or like the demo's on two cores (`--costs cpu`: a step takes 14.5 ms and 0.25 ms for each further
row, the three drafters are in the router and answer at once, the fourth takes 0.5 ms for a token): beside three good
drafters one that is bad (random tokens, sure of each), slow (ten times the time of the others, and as good), lying (as
good as the best for its first hundred answers, wrong from then on, always sure), silent (never answers) or foreign
(tokens of another vocabulary, by its own scale of confidence). Tokens/s are counted once a hundred rounds of each place
for a request are over, however slow. A pair is one seed: the same requests with it and without it; beside it stands
what asking it in every round would cost. `no fault`: the fourth drafter is good, and the panel stands against asking
everybody: what the panel itself costs where there is nothing to do.

`--real`, with the flags of lab/bench/misbehaving_real.py: the same once for real, on the whole system as processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from lab.bench.intervals import Interval, ratios
from lab.bench.misled import COSTS, KINDS, NO_FAULT, simulate
from lab.bench.report import RESULTS, publish
from moot.core.speculation.panel import ALL, PAYING
from moot.simulation.world import Outcome

CONCURRENCIES = (1, 4, 16)
BOUND = 0.98
FIRST_SEED = 11

Job = tuple[str | None, int, int, int, str, str]
"""Kind, concurrency, rounds, seed, whom rounds ask, costs."""


def outcome(job: Job) -> Outcome:
    return simulate(*job)


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
    run: Callable[[Callable[[Job], Outcome], Iterable[Job]], Iterable[Outcome]] = map,
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
        f"{statistics.median(one.without):,.1f}",
        f"{statistics.median(one.paying):,.1f}",
        one.ratio.text(3),
        "reached" if one.is_reached else "missed",
        ratios(one.everybody, one.without[: len(one.everybody)]).text(3),
    )


HEADER = (
    "fourth drafter",
    "concurrency",
    "tokens/s without",
    "with",
    "with / without (95 %)",
    "at least 0.98",
    "asked always",
)


def name_of(costs: str) -> str:
    """Of the result."""
    return "misbehaving" if costs == "gpu" else f"misbehaving_{costs}"


def earlier(costs: str) -> dict[tuple[str, int], Found]:
    """What the result file holds; nothing without one."""
    path = RESULTS / f"{name_of(costs)}.json"
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())["tokens_per_s"]
    return {(kind, int(at)): Found(**one) for kind, places in kept.items() for at, one in places.items()}


def virtual(rounds: int, seeds: Sequence[int], concurrencies: Sequence[int], keep: bool, costs: str) -> bool:
    found = earlier(costs) if keep else {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as processes:
        for concurrency in concurrencies:
            for kind, one in compare(concurrency, rounds, seeds, run=processes.map, costs=costs).items():
                found[kind, concurrency] = one
                print(*row(kind, concurrency, one), sep="  ", flush=True)

    found = dict(sorted(found.items(), key=lambda plan: plan[0][1]))
    places = sorted({concurrency for _, concurrency in found})

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        width = 0.8 / len(places)
        kinds = [*KINDS, NO_FAULT]
        for place, concurrency in enumerate(places):
            cells = [found[kind, concurrency].ratio for kind in kinds]
            axes.bar(
                [index + (place - (len(places) - 1) / 2) * width for index in range(len(kinds))],
                [cell.median for cell in cells],
                width,
                yerr=[[c.median - c.low for c in cells], [c.high - c.median for c in cells]],
                label=f"{concurrency} at a time",
            )
        axes.axhline(BOUND, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set(ylabel="tokens/s with the drafter, of those without", ylim=(0.5, 1.1))
        axes.legend()

    rows = [row(*plan, one) for plan, one in found.items()]
    facts: dict[str, dict[int, Any]] = {}
    for (kind, concurrency), one in found.items():
        facts.setdefault(kind, {})[concurrency] = asdict(one)
    publish(name_of(costs), HEADER, rows, {"seeds": list(seeds), "tokens_per_s": facts}, draw, "misbehaving")
    return all(one.is_reached for one in found.values())


def main() -> int:
    if "--real" in sys.argv:
        from lab.bench import misbehaving_real  # imports a whole system, which simulating processes do without

        sys.argv.remove("--real")
        return misbehaving_real.main()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=300, help="rounds of each place for a request that are counted")
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)))
    parser.add_argument("--keep", action="store_true", help="keep other concurrencies from the result file")
    parser.add_argument("--costs", default="gpu", choices=tuple(COSTS))
    given = parser.parse_args()
    places = [int(text) for text in given.concurrency.split(",")]
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    return 0 if virtual(given.rounds, seeds, places, given.keep, given.costs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
