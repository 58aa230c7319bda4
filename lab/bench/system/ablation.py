"""Minions' own ablation on the whole system: what each step from plain decoding to the default brings, through HTTP.

    python -m lab.bench.ablation [--concurrency 1,4,16] [--max-tokens 32] [--single suffix] [--fixed 4]
    python -m lab.bench.ablation --prompts FILE --held-out [--neural MODEL [--stages suffix]]

Steps, each with what the one before has: plain; the best single drafter with fixed K; a majority vote with Minions'
weights; the calibrated vote with hedge weights; K by goodput; a tree; only drafters that pay. With `--neural` further
drafter processes vote beside the cheap ones in a drafter set of their own each: a draft model in one stage, the same
in two stages, the same drafting ahead, and with a cascade (expensive ones are asked only where cheap ones are not
sure). A step is a router with its flags, or a field of its requests; all routers stand before one verifier and the same
drafters. At each concurrency every step answers the same prompts, in turns, the order reversed every other time;
greedy, of equal length; the first turn warms up. Ratios are of runs of one turn. Answers are compared id by id over all
steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.bench.harness.arms import Arm, Column, Runs, in_turns
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.prompts import read_prompts, repeated
from lab.bench.harness.systems import LoadConfig, Loads, Routers
from moot.commands.common import say
from moot.commands.system import NO_STORE, System, running
from moot.config import option
from moot.runtime.supervisor import Child

BENCH = Bench("ablation", __doc__, measures=("services", "moot/core", "moot/drafters", "moot/model"))
PLAIN = "plain"
ONE_STAGE = "+ draft model"
HEADER = (
    *("concurrency", "step", "tokens/s", "of plain (95 %)", "of the step before (95 %)", "tokens/round"),
    *("drafted/round", "identical"),
)


@dataclass(frozen=True, kw_only=True)
class Config(LoadConfig):
    redis_url: str | None = option(NO_STORE, help="'off': no records, as in every step")
    concurrency: tuple[int, ...] = option((1, 4, 16), help="callers at a time")
    answers: int = option(4, help="answers of a run at least; one per caller where that is more")
    max_tokens: int = option(32, help="tokens of each answer")
    single: str = option("suffix", help="the best single drafter")
    fixed: int = option(4, help="fixed K")
    steps: tuple[str, ...] = option((), help="only steps whose names contain one of these, and plain; none: all")
    neural: str | None = option(None, help="a draft model, as --model of a drafter takes it")
    neural_options: tuple[str, ...] = option((), help="options of the draft model, name=value")
    stages: str = option("suffix", help="stages of the draft model in two stages")
    cascade: float = option(0.5, help="threshold of the cascade")
    keep: bool = option(False, help="keep figures of other concurrencies from the last result")


def arm(
    name: str, before: str, flags: Sequence[str] = (), body: Mapping[str, Any] | None = None, drafter: str = ""
) -> Arm:
    """`flags`: of its router; arms of equal flags and drafter share one. `body`: fields of its requests. `drafter`: a
    drafter process beside those that all have."""
    return Arm(name, {"flags": tuple(flags), "body": body or {}, "drafter": drafter}, before)


def steps(config: Config) -> list[Arm]:
    ask_all = ("--asks", "all")
    fixed_chain = ("--shape", "chain", "--length", "fixed", *ask_all)
    minions = ("--vote", "majority", "--weights", "minions", *fixed_chain)
    calibrated = ("--vote", "calibrated", "--weights", "hedge", *fixed_chain)
    fixed = {"num_speculative_tokens": config.fixed}
    single = f"best single drafter, K = {config.fixed}"
    found = [
        arm(PLAIN, PLAIN, body={"num_speculative_tokens": 0}),
        arm(single, PLAIN, minions, fixed | {"drafters": [config.single]}),
        arm("+ majority vote", single, minions, fixed),
        arm("+ calibrated vote", "+ majority vote", calibrated, fixed),
        arm("+ adaptive K", "+ calibrated vote", ("--shape", "chain", *ask_all)),
        arm("+ tree", "+ adaptive K", ask_all),
        arm("+ only who pays", "+ tree"),
    ]
    if config.neural is not None:
        found += [
            arm(ONE_STAGE, "+ only who pays", drafter="neural"),
            arm("in two stages", ONE_STAGE, drafter="two-stage"),
            arm("drafting ahead", ONE_STAGE, drafter="ahead"),
            arm("with a cascade", ONE_STAGE, ("--cascade", str(config.cascade)), drafter="neural"),
        ]
    wanted = config.steps
    chosen = [one for one in found if one.name == PLAIN or not wanted or any(part in one.name for part in wanted)]
    names = {one.name for one in chosen}
    # A step whose predecessor is left out is compared with plain.
    return [one if one.before in names else replace(one, before=PLAIN) for one in chosen]


def routers_of(system: System, config: Config, chosen: Sequence[Arm]) -> dict[str, Child]:
    """The router of every step, ready."""
    routers = Routers(system, config)
    made_drafters: dict[str, Child] = {}
    for name in sorted({one.differs["drafter"] for one in chosen} - {""}):
        options = list(config.neural_options) + ([f"stages={config.stages}"] if name == "two-stage" else [])
        flags = ["--kind", "neural", "--model", str(config.neural), "--num-threads", "1"]
        flags += ["--draft-ahead", "on" if name == "ahead" else "off"]
        flags += ["--option", ",".join(options)] if options else []
        made_drafters[name] = routers.drafter(name, flags, {})
    routers.wait(list(made_drafters.values()))
    made: dict[tuple[tuple[str, ...], str], Child] = {}
    for one in chosen:
        key = flags_, drafter = one.differs["flags"], one.differs["drafter"]
        if key not in made:
            drafters = {drafter: made_drafters[drafter]} if drafter else {}
            made[key] = routers.router(f"router-{len(made)}", flags_, drafters)
    routers.wait(list(made.values()), are_routers=True)
    say(f"{len(made)} routers for {len(chosen)} steps")
    return {one.name: made[one.differs["flags"], one.differs["drafter"]] for one in chosen}


def rows(found: Mapping[str, Mapping[str, Any]], chosen: Sequence[Arm]) -> list[list[str]]:
    table = []
    for concurrency, at in found.items():
        runs = Runs(at["runs"])
        for one in chosen:
            if one.name not in runs.of:
                continue
            columns = (
                Column("", "tokens_per_s", 1, is_plain=True),
                Column("", "tokens_per_s", base=PLAIN),
                Column("", "tokens_per_s", base=one.before),
                Column("", "tokens_per_round", is_plain=True),
                Column("", "drafted_per_round", 1, is_plain=True),
            )
            cells = [column.cell(runs, one.name) for column in columns]
            table.append([concurrency, one.name, *cells, "NO" if one.name in at["differing"] else "yes"])
    return table


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    chosen = steps(config)
    prompts = read_prompts(config, max(config.answers, *config.concurrency), over_categories=True)
    found: dict[str, Any] = BENCH.kept(config).get("found", {}) if config.keep else {}
    with running(config, "ablation", say) as system:
        routers = routers_of(system, config, chosen)
        for concurrency in config.concurrency:
            loads = Loads(system, config.max_tokens)
            asked = repeated(prompts, max(concurrency, config.answers))

            def take(
                one: Arm, loads: Loads = loads, asked: Mapping[str, str] = asked, concurrency: int = concurrency
            ) -> dict[str, float]:
                return loads.run(one.name, routers[one.name], asked, concurrency, one.differs["body"]).figures

            runs = in_turns(chosen, take, config.repetitions)
            found[str(concurrency)] = {"runs": runs, "differing": sorted(loads.differing)}
    found = {key: found[key] for key in sorted(found, key=int)}
    table = Table(HEADER, rows(found, chosen), labels=2)
    BENCH.publish(config, table, {"found": found}, HEADER[3], argv=argv)
    return 0 if not any(at["differing"] for at in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
