"""The real part of bench.misbehaving: the whole system with a faulty drafter process more, and without it.

    python -m lab.bench.misbehaving_real [--faults lie,delay:0.05,freeze,garbage] [--concurrency 4] [--repetitions 7]
                                     [--keep]

The verifier, the router and the drafters of `moot demo`; for each fault of services/drafter/drafting.py a process of
the kind `suffix` that has it, and a router whose drafter set has that one more (`none`: it has no fault; what a further
process costs). Loads take turns, each on a router of its own, since what is left out is a router's to learn. First come
a hundred rounds of each place for a request, however slow. A pair is a load with the faulty one and the load without
any in the same turn; answers are compared id by id. With --keep, pairs are added to those of the last result, so that
many can be measured in parts: each part starts everything anew, hundred rounds included.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.bench.harness.arms import Arm, in_turns
from lab.bench.harness.intervals import Interval, ratios
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.prompts import read_prompts, repeated
from lab.bench.harness.systems import LIGHT, LoadConfig, Loads, Routers
from lab.bench.harness.watched import metrics_of
from moot.commands.common import say
from moot.commands.system import NO_STORE, running
from moot.config import option
from moot.runtime.supervisor import Child
from services.drafter.drafting import POINT

BENCH = Bench("misbehaving_real", __doc__, measures=("services", "moot/core"))
BOUND = 0.98
FIRST_ROUNDS = 100
WITHOUT, NO_FAULT = "without", "none"
HEADER = (
    *("fault", "concurrency", "pairs", "tokens/s without", "with / without (95 %)", "at least 0.98"),
    *("left out as", "identical"),
)


@dataclass(frozen=True, kw_only=True)
class Config(LoadConfig):
    redis_url: str | None = option(NO_STORE, help="'off': no records")
    faults: tuple[str, ...] = option(("lie", "delay:0.05", "freeze", "garbage"), help="one process for each")
    concurrency: int = option(4, help="callers at a time")
    keep: bool = option(False, help="add to the pairs of the last result")

    @property
    def arms(self) -> list[Arm]:
        faulty = [Arm(fault, {"drafter": f"faulty{number}"}) for number, fault in enumerate(self.faults)]
        return [Arm(WITHOUT), *faulty]


def add_routers(routers: Routers, config: Config) -> dict[str, Child]:
    """A router with its faulty drafter for each fault, ready."""
    drafters: dict[str, Child] = {}
    for arm in config.arms[1:]:
        environ = LIGHT | ({} if arm.name == NO_FAULT else {"MOOT_FAULTS": f"{POINT}={arm.name}"})
        flags = ["--kind", "suffix", "--tokenizer", routers.model]
        drafters[arm.name] = routers.drafter(arm.differs["drafter"], flags, environ, essential=False)
    routers.wait(list(drafters.values()))
    flags = ["--shape", config.shape, "--proposal-width", str(config.proposal_width)]
    made = {
        arm.name: routers.router(f"router-{place}", flags, {arm.differs["drafter"]: drafters[arm.name]})
        for place, arm in enumerate(config.arms[1:])
    }
    routers.wait(list(made.values()), are_routers=True)
    return made


def left_out(router: Child, drafter_id: str) -> str:
    """Why the router does not ask the faulty one; empty where it does."""
    samples = metrics_of(int(router.facts["metrics_port"]))
    found = [
        labels.partition(",")[2]
        for (name, labels), value in samples.items()
        if name == "moot_drafters_left_out" and value and labels.partition(",")[0] == drafter_id
    ]
    return ", ".join([*found, *(["ejected"] if samples.get(("moot_peers", "drafter,ejected")) else [])])


Found = dict[str, dict[str, Any]]
"""By fault: tokens/s `with_it` and `without`, why it was `left_out` at the end of each part, and `identical`."""


def measured(config: Config, found: Found) -> None:
    """Adds this run's pairs to `found`."""
    with running(config, "misbehaving", say) as system:
        sides = {WITHOUT: system.router} | add_routers(Routers(system, config), config)
        loads = Loads(system, config.max_tokens)
        prompts = repeated(read_prompts(config, config.answers, over_categories=True), config.answers)

        def take(arm: Arm) -> dict[str, float]:
            return loads.run(arm.name, sides[arm.name], prompts, config.concurrency, {}).figures

        for arm in config.arms:
            say(f"a hundred rounds: {arm.name}")
            left = float(FIRST_ROUNDS * config.concurrency)
            while left > 0:
                left -= take(arm)["rounds"]
        runs = in_turns(config.arms, take, config.repetitions, warm_up=0)
        for arm in config.arms[1:]:
            one = found.setdefault(arm.name, {"with_it": [], "without": [], "left_out": [], "identical": True})
            one["with_it"] += [run["tokens_per_s"] for run in runs[arm.name]]
            one["without"] += [run["tokens_per_s"] for run in runs[WITHOUT]]
            one["left_out"].append(left_out(sides[arm.name], arm.differs["drafter"]))
            one["identical"] = one["identical"] and not {arm.name, WITHOUT} & loads.differing


def verdict(ratio: Interval) -> str:
    """As everywhere: missed is what lies below as a whole; and a median below says so."""
    if ratio.verdict(at_least=BOUND) == "missed":
        return "missed"
    return "reached" if ratio.median >= BOUND else "median below"


def row(concurrency: str, fault: str, one: Mapping[str, Any]) -> list[object]:
    reasons = " / ".join(sorted({reason or "asked" for reason in one["left_out"]})) or "not looked at"
    speed = f"{Interval.of(one['without']).median:,.1f}"
    ratio = ratios(one["with_it"], one["without"])
    identical = "yes" if one["identical"] else "NO"
    return [fault, concurrency, len(one["with_it"]), speed, ratio.text(3), verdict(ratio), reasons, identical]


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    found: dict[str, Found] = BENCH.kept(config).get("found", {}) if config.keep else {}
    measured(config, found.setdefault(str(config.concurrency), {}))
    rows = [row(at, fault, one) for at in sorted(found, key=int) for fault, one in found[at].items()]
    BENCH.publish(config, Table(HEADER, rows, labels=2), {"found": found}, HEADER[4], argv=argv)
    return 0 if all("reached" in row and row[-1] == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
