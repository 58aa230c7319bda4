"""Minions' own ablation on the whole system: what each step from plain decoding to the default brings, through HTTP.

    python -m bench.ablation [--concurrency 1,4,16] [--repetitions 7] [--max-tokens 32] [--single suffix] [--fixed 4]
    python -m bench.ablation --prompts FILE --held-out [--neural MODEL [--stages suffix]] [--inside-drafters ...]

Steps, each with what the one before has: plain; the best single drafter with fixed K; a majority vote with Minions'
weights; the calibrated vote with hedge weights; K by goodput; a tree; only drafters that pay. With `--neural` further
drafter processes vote beside the cheap ones in an electorate of their own each: a draft model in one stage, the same in
two stages, the same drafting ahead, and with a cascade (dear ones are asked only where cheap ones are not sure). A step
is a router with its flags, or a field of its requests; all routers stand before one verifier and the same drafters. At
each concurrency every step answers the same prompts, in turns, the order reversed every other time; greedy, of equal
length; the first turn warms up. Ratios are of runs of one turn. Answers are compared id by id over all steps.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.driving.prompts import held_out, read_prompts
from lab.bench.driving.routers import wait_serving
from lab.bench.driving.streams import closed_loop
from lab.bench.intervals import Interval, ratios
from lab.bench.peers.prompts import evenly, text_of
from lab.bench.report import RESULTS, publish
from moot.commands.common import say
from moot.commands.system import LOOPBACK, NO_STORE, System, SystemConfig, prepared_model, running, voters_of
from moot.config import load_config, option
from moot.core.errors import ConfigError
from moot.runtime.supervisor import Child

PLAIN = "plain"
ONE_STAGE = "+ draft model"
HEADER = (
    *("concurrency", "step", "tokens/s", "of plain (95 %)", "of the step before (95 %)", "tokens/round"),
    *("drafted/round", "identical"),
)


@dataclass(frozen=True, kw_only=True)
class AblationConfig(SystemConfig):
    port: int = option(0, help="port of the unused first router; 0 chooses a free one")
    redis_url: str | None = option(NO_STORE, help="'off': no records, as in every step")
    prompts: Path | None = option(None, help="JSON lines with `turns` or `prompt`; none: the repository's own")
    held_out: bool = option(False, help="of the file only questions whose id ends in 7")
    concurrency: tuple[str, ...] = option(("1", "4", "16"), help="callers at a time")
    answers: int = option(4, help="answers of a run at least; one per caller where that is more")
    repetitions: int = option(7, help="runs of each step at each concurrency")
    max_tokens: int = option(32, help="tokens of each answer")
    single: str = option("suffix", help="the best single drafter")
    fixed: int = option(4, help="fixed K")
    steps: tuple[str, ...] = option((), help="only steps whose names contain one of these, and plain; none: all")
    neural: str | None = option(None, help="a draft model, as --model of a drafter takes it")
    neural_options: tuple[str, ...] = option((), help="options of the draft model, name=value")
    stages: str = option("suffix", help="stages of the draft model in two stages")
    cascade: float = option(0.5, help="threshold of the cascade")
    keep: bool = option(False, help="keep figures of other concurrencies from the result file")


@dataclass(frozen=True, slots=True)
class Step:
    """`flags`: of its router; steps of equal flags and voters share one. `body`: fields of its requests. `voters`:
    drafter processes beside those that all have. `before`: what it is compared with."""

    name: str
    before: str
    flags: tuple[str, ...]
    body: Mapping[str, Any] = field(default_factory=dict)
    voters: tuple[str, ...] = ()


def steps(config: AblationConfig) -> list[Step]:
    everybody = ("--asks", "all")
    minions = ("--vote", "majority", "--shape", "chain", "--weights", "minions", "--length", "fixed", *everybody)
    calibrated = ("--vote", "calibrated", "--shape", "chain", "--weights", "hedge", "--length", "fixed", *everybody)
    chain, tree, whole = ("--shape", "chain", *everybody), everybody, ()
    fixed = {"num_speculative_tokens": config.fixed}
    single = f"best single drafter, K = {config.fixed}"
    found = [
        Step(PLAIN, PLAIN, whole, {"num_speculative_tokens": 0}),
        Step(single, PLAIN, minions, fixed | {"drafters": [config.single]}),
        Step("+ majority vote", single, minions, fixed),
        Step("+ calibrated vote", "+ majority vote", calibrated, fixed),
        Step("+ adaptive K", "+ calibrated vote", chain),
        Step("+ tree", "+ adaptive K", tree),
        Step("+ only who pays", "+ tree", whole),
    ]
    if config.neural is not None:
        cascade = ("--cascade", str(config.cascade))
        found += [
            Step(ONE_STAGE, "+ only who pays", whole, voters=("neural",)),
            Step("in two stages", ONE_STAGE, whole, voters=("two-stage",)),
            Step("drafting ahead", ONE_STAGE, whole, voters=("ahead",)),
            Step("with a cascade", ONE_STAGE, cascade, voters=("neural",)),
        ]
    wanted = config.steps
    chosen = [one for one in found if one.name == PLAIN or not wanted or any(part in one.name for part in wanted)]
    names = {one.name for one in chosen}
    # A step whose predecessor is left out is compared with plain.
    return [one if one.before in names else Step(one.name, PLAIN, one.flags, one.body, one.voters) for one in chosen]


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_s: float
    tokens_per_round: float
    drafted_per_round: float
    texts: dict[str, tuple[int, ...]]


class Routers:
    """The routers of all steps, on a running system."""

    def __init__(self, system: System, config: AblationConfig, chosen: Sequence[Step]) -> None:
        self._system = system
        self._model = prepared_model(config.model, say)
        self.name = system.client.models()[0]
        supervisor = system.supervisor
        processes = {child.name.removeprefix("drafter-"): child for child in system.drafters}
        self._inside = [str(entry) for entry in voters_of(config).in_router]
        further = {name: self._draft_model(config, name) for name in sorted({v for one in chosen for v in one.voters})}
        supervisor.wait_ready(list(further.values()), config.start_timeout_s)
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], Child] = {}
        for one in chosen:
            if (one.flags, one.voters) not in made:
                drafters = processes | {name: further[name] for name in one.voters}
                made[one.flags, one.voters] = self._router(len(made), one.flags, drafters)
        supervisor.wait_ready(list(made.values()), config.start_timeout_s)
        for router in made.values():
            wait_serving(router)
        self._of = {one.name: made[one.flags, one.voters] for one in chosen}
        say(f"{len(made)} routers for {len(chosen)} steps")

    def url(self, step: Step) -> str:
        self._system.supervisor.check()
        return f"http://{LOOPBACK}:{self._of[step.name].port}"

    def _draft_model(self, config: AblationConfig, name: str) -> Child:
        options = list(config.neural_options) + ([f"stages={config.stages}"] if name == "two-stage" else [])
        flags = ["--kind", "neural", "--drafter-id", name, "--model", str(config.neural), "--num-threads", "1"]
        flags += ["--host", LOOPBACK, "--port", "0", "--metrics-port", "0"]
        flags += ["--draft-ahead", "on" if name == "ahead" else "off"]
        flags += ["--option", ",".join(options)] if options else []
        return self._system.supervisor.service(f"drafter-{name}", "drafter", flags)

    def _router(self, number: int, flags: Sequence[str], drafters: Mapping[str, Child]) -> Child:
        own = ["--model", str(self._model), "--served-model-name", self.name, "--host", LOOPBACK, "--port", "0"]
        own += ["--grpc-port", "0", "--metrics-port", "0", "--redis-url", "none", "--log-level", "warning"]
        own += ["--verifiers", f"{LOOPBACK}:{self._system.verifier.port}"]
        own += ["--drafters", ",".join(f"{name}={LOOPBACK}:{child.port}" for name, child in drafters.items())]
        own += ["--in-process-drafters", ",".join(self._inside)]
        return self._system.supervisor.service(f"router-{number}", "router", [*own, *flags])


def ask_all(url: str, model: str, step: Step, prompts: Mapping[str, str], concurrency: int, max_tokens: int) -> Run:
    """Raises RequestBroken."""
    shared = {"model": model, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | dict(step.body)
    bodies = [(name, shared | {"messages": [{"role": "user", "content": prompt}]}) for name, prompt in prompts.items()]
    replies, seconds = asyncio.run(closed_loop(url, bodies, concurrency))
    tokens = sum(len(reply.token_ids) for reply in replies)
    counts = [reply.metrics["speculative_decoding"] for reply in replies]
    rounds = max(sum(one["num_spec_steps"] for one in counts), 1)
    drafted = sum(one["num_draft_tokens"] for one in counts)
    texts = {reply.name: reply.token_ids for reply in replies}
    # The first token of each answer comes with its opening.
    return Run(tokens / seconds, (tokens - len(replies)) / rounds, drafted / rounds, texts)


def measure(
    routers: Routers, chosen: Sequence[Step], config: AblationConfig, prompts: Mapping[str, str], concurrency: int
) -> dict[str, Any]:
    number = max(concurrency, config.answers)
    names = list(prompts)
    # Few prompts are asked again under other names: copies of one text, each compared with the same of other steps.
    picked = {f"{names[i % len(names)]}#{i}": prompts[names[i % len(names)]] for i in range(number)}
    runs: dict[str, list[Run]] = {one.name: [] for one in chosen}
    texts: dict[str, tuple[int, ...]] = {}
    differing: set[str] = set()
    for turn in range(config.repetitions + 1):
        begin = time.monotonic()
        for one in chosen if turn % 2 == 0 else reversed(chosen):
            run = ask_all(routers.url(one), routers.name, one, picked, concurrency, config.max_tokens)
            if any(texts.setdefault(name, ids) != ids for name, ids in run.texts.items()):
                differing.add(one.name)
            if turn:
                runs[one.name].append(run)
        if turn:
            speeds = "  ".join(f"{runs[one.name][-1].tokens_per_s:.1f}" for one in chosen)
            say(f"{concurrency} callers, {turn}/{config.repetitions}: {speeds}  ({time.monotonic() - begin:.0f} s)")
    kept = {name: [asdict(run) | {"texts": None} for run in found] for name, found in runs.items()}
    return {"runs": kept, "differing": sorted(differing)}


def speeds(found: Mapping[str, Any], name: str, key: str = "tokens_per_s") -> list[float]:
    return [run[key] for run in found["runs"][name]]


def rows(found: Mapping[str, Mapping[str, Any]], chosen: Sequence[Step]) -> list[tuple[object, ...]]:
    return [
        (
            concurrency,
            one.name,
            Interval.of(speeds(at, one.name)).text(1),
            ratios(speeds(at, one.name), speeds(at, PLAIN)).text(),
            ratios(speeds(at, one.name), speeds(at, one.before)).text(),
            f"{statistics.median(speeds(at, one.name, 'tokens_per_round')):.2f}",
            f"{statistics.median(speeds(at, one.name, 'drafted_per_round')):.1f}",
            "NO" if one.name in at["differing"] else "yes",
        )
        for concurrency, at in found.items()
        for one in chosen
        if one.name in at["runs"]
    ]


def draw(figure: Any, found: Mapping[str, Mapping[str, Any]], chosen: Sequence[Step]) -> None:
    axes = figure.subplots()
    names = [one.name for one in chosen if all(one.name in at["runs"] for at in found.values())]
    width = 0.8 / len(found)
    for place, (concurrency, at) in enumerate(found.items()):
        cells = [ratios(speeds(at, name), speeds(at, PLAIN)) for name in names]
        axes.bar(
            [index + (place - (len(found) - 1) / 2) * width for index in range(len(names))],
            [cell.median for cell in cells],
            width,
            yerr=[[c.median - c.low for c in cells], [c.high - c.median for c in cells]],
            label=f"{concurrency} at a time",
        )
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set(ylabel="tokens/s of plain decoding")
    axes.legend()


def chosen_prompts(config: AblationConfig, most: int) -> dict[str, str]:
    """At most `most`, by name, evenly over the categories. Raises ConfigError for --held-out without a file."""
    if config.held_out:
        if config.prompts is None:
            raise ConfigError("--held-out needs --prompts")
        lines = [json.loads(line) for line in config.prompts.read_text().splitlines() if line.strip()]
        return {str(line["question_id"]): text_of(line) for line in evenly(held_out(lines), most)}
    return read_prompts(config.prompts, most)


def main() -> int:
    config = load_config(AblationConfig, sys.argv[1:], prog="python -m bench.ablation", description=__doc__ or "")
    chosen = steps(config)
    prompts = chosen_prompts(config, max(config.answers, *map(int, config.concurrency)))
    kept = RESULTS / "ablation.json"
    found: dict[str, Any] = json.loads(kept.read_text())["found"] if config.keep and kept.exists() else {}
    with running(config, "ablation", say) as system:
        routers = Routers(system, config, chosen)
        for concurrency in config.concurrency:
            found[concurrency] = measure(routers, chosen, config, prompts, int(concurrency))
    found = {key: found[key] for key in sorted(found, key=int)}
    facts = {"found": found, "steps": [asdict(one) for one in chosen]}
    publish("ablation", HEADER, rows(found, chosen), facts, lambda figure: draw(figure, found, chosen))
    return 0 if not any(at["differing"] for at in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
