"""The real part of lab/bench/misbehaving.py: the whole system with a faulty drafter process more, and without it.

    python -m bench.misbehaving_real [--faults lie,delay:0.05,freeze,garbage] [--concurrency 4] [--repetitions 7]
                                     [--keep] [--report-only]

The verifier, the router and the drafters of `moot demo`; for each fault of services/drafter/drafting.py a process of
the kind `suffix` that has it, and a router whose electorate has that one more (`none`: it has no fault; what a further
process costs). Loads take turns, each on a router of its own, since what is left out is a router's to learn. First come
a hundred rounds of each place for a request, however slow. A pair is a load with the faulty one and the load without
any in the same turn; answers are compared id by id. With --keep, pairs are added to those of the result file, so that
many can be measured in parts: each part starts everything anew, hundred rounds included.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.bench.driving.prompts import read_prompts
from lab.bench.driving.routers import wait_serving
from lab.bench.driving.streams import Reply, closed_loop
from lab.bench.driving.watched import lengths_asked, metrics_of
from lab.bench.intervals import Interval, ratios
from lab.bench.report import RESULTS, publish
from moot.commands.common import say
from moot.commands.system import LOOPBACK, NO_STORE, System, SystemConfig, prepared_model, running, voters_of
from moot.config import load_config, option
from moot.runtime.supervisor import Child
from services.drafter.drafting import POINT

BOUND = 0.98
FIRST_ROUNDS = 100
WITHOUT = "without"
NO_FAULT = "none"
NAME = "misbehaving_real"
HEADER = (
    *("fault", "concurrency", "pairs", "tokens/s without", "with", "with / without (95 %)", "at least 0.98"),
    *("left out as", "identical"),
)


@dataclass(frozen=True, kw_only=True)
class RealConfig(SystemConfig):
    port: int = option(0, help="port of the first router; 0 chooses a free one")
    redis_url: str | None = option(NO_STORE, help="'off': no records")
    faults: tuple[str, ...] = option(("lie", "delay:0.05", "freeze", "garbage"), help="one process for each")
    prompts: Path | None = option(None, help="JSON lines with `turns` or `prompt`; none: the repository's own")
    concurrency: int = option(4, help="callers at a time")
    answers: int = option(8, help="answers of a load")
    repetitions: int = option(7, help="loads of each")
    max_tokens: int = option(48, help="tokens of each answer")
    keep: bool = option(False, help="add to the pairs of the result file")
    report_only: bool = option(False, help="measure nothing, report the pairs of the result file")


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a router. `mean_k`: of its rounds; `draft_ms`: from asking to the vote, mean of its rounds."""

    tokens_per_s: float
    num_rounds: int
    mean_k: float
    draft_ms: float


class Sides:
    """A router without faulty drafters, and one for each fault."""

    def __init__(self, system: System, config: RealConfig) -> None:
        self._system, self._config = system, config
        self._name = system.client.models()[0]
        prompts = list(read_prompts(config.prompts, config.answers).items())
        self._prompts = {
            f"{prompts[i % len(prompts)][0]}#{i}": prompts[i % len(prompts)][1] for i in range(config.answers)
        }
        supervisor = system.supervisor
        model = str(prepared_model(config.model, say))
        self._faulty = {fault: self._drafter(fault, number, model) for number, fault in enumerate(config.faults)}
        supervisor.wait_ready(list(self._faulty.values()), config.start_timeout_s)
        self._routers = {WITHOUT: system.router}
        for number, (fault, drafter) in enumerate(self._faulty.items()):
            self._routers[fault] = self._router(f"router-{number}", f"faulty{number}", drafter, model)
        supervisor.wait_ready(list(self._routers.values()), config.start_timeout_s)
        for router in self._routers.values():
            wait_serving(router)
        self.texts: dict[str, tuple[int, ...]] = {}
        self.differing: set[str] = set()

    def _drafter(self, fault: str, number: int, model: str) -> Child:
        flags = ["--kind", "suffix", "--drafter-id", f"faulty{number}", "--tokenizer", model]
        flags += ["--host", LOOPBACK, "--port", "0", "--metrics-port", "0", "--log-level", "error"]
        environ = {"OMP_NUM_THREADS": "1"} | ({} if fault == NO_FAULT else {"MOOT_FAULTS": f"{POINT}={fault}"})
        return self._system.supervisor.service(
            f"drafter-faulty{number}", "drafter", flags, environ=environ, essential=False
        )

    def _router(self, name: str, faulty_id: str, faulty: Child, model: str) -> Child:
        """As the system's own, with one drafter more."""
        config, voters = self._config, voters_of(self._config)
        processes = {child.name.removeprefix("drafter-"): child for child in self._system.drafters} | {
            faulty_id: faulty
        }
        flags = ["--model", model, "--served-model-name", self._name, "--host", LOOPBACK, "--port", "0"]
        flags += ["--grpc-port", "0", "--metrics-port", "0", "--redis-url", "none", "--log-level", config.log_level]
        flags += ["--verifiers", f"{LOOPBACK}:{self._system.verifier.port}"]
        flags += ["--drafters", ",".join(f"{one}={LOOPBACK}:{child.port}" for one, child in processes.items())]
        flags += ["--in-process-drafters", ",".join(map(str, voters.in_router))]
        flags += ["--shape", config.shape, "--proposal-width", str(config.proposal_width)]
        environ = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return self._system.supervisor.service(name, "router", flags, environ=environ)

    def load(self, side: str) -> Load:
        """Raises RequestBroken."""
        self._system.supervisor.check()
        config = self._config
        shared: dict[str, Any] = {"model": self._name, "temperature": 0, "ignore_eos": True}
        bodies = [
            (name, shared | {"max_tokens": config.max_tokens, "messages": [{"role": "user", "content": prompt}]})
            for name, prompt in self._prompts.items()
        ]
        before = self._metrics(side)
        replies, seconds = asyncio.run(
            closed_loop(f"http://{LOOPBACK}:{self._routers[side].port}", bodies, config.concurrency)
        )
        after = self._metrics(side)
        for reply in replies:
            if self.texts.setdefault(reply.name, reply.token_ids) != reply.token_ids:
                self.differing.add(side)
        rounds = sum(map(_rounds, replies))
        lengths = lengths_asked(before, after)
        key = ("moot_round_duration_seconds_sum", "draft")
        drafting = after[key] - before.get(key, 0.0)
        found = Load(
            sum(len(reply.token_ids) for reply in replies) / seconds,
            rounds,
            sum(length * count for length, count in lengths.items()) / max(sum(lengths.values()), 1),
            1e3 * drafting / max(rounds, 1),
        )
        say(
            f"{side:<12} {found.tokens_per_s:6.1f} tokens/s  {rounds} rounds  mean K {found.mean_k:.2f}"
            f"  drafting {found.draft_ms:.1f} ms  {self.left_out(side)}"
        )
        return found

    def warm_up(self, side: str) -> None:
        """A hundred rounds for each place."""
        left = FIRST_ROUNDS * self._config.concurrency
        while left > 0:
            left -= self.load(side).num_rounds

    def left_out(self, side: str) -> str:
        """Why its router does not ask the faulty one; empty where it does."""
        if side == WITHOUT:
            return ""
        number = list(self._faulty).index(side)
        samples = self._metrics(side)
        found = [
            labels.partition(",")[2]
            for (name, labels), value in samples.items()
            if name == "moot_drafters_left_out" and value and labels.partition(",")[0] == f"faulty{number}"
        ]
        if samples.get(("moot_peers", "drafter,ejected")):
            found.append("ejected")
        return ", ".join(found)

    def _metrics(self, side: str) -> dict[tuple[str, str], float]:
        return metrics_of(int(self._routers[side].facts["metrics_port"]))


def _rounds(reply: Reply) -> int:
    return int(reply.metrics["speculative_decoding"]["num_spec_steps"])


@dataclass(slots=True)
class Found:
    """Tokens/s of the pairs of one fault at one concurrency, over all parts; `left_out`: at the end of each part."""

    with_it: list[float]
    without: list[float]
    left_out: list[str]
    identical: bool

    @property
    def ratio(self) -> Interval:
        return ratios(self.with_it, self.without)

    @property
    def verdict(self) -> str:
        """As everywhere: missed is what lies below as a whole; and a median below says so."""
        if self.ratio.verdict(at_least=BOUND) == "missed":
            return "missed"
        return "reached" if self.ratio.median >= BOUND else "median below"


Table = dict[tuple[int, str], Found]


def measured(config: RealConfig, found: Table) -> None:
    """Adds to `found`."""
    with running(config, "misbehaving", say) as system:
        sides = Sides(system, config)
        names = [WITHOUT, *config.faults]
        for name in names:
            say(f"a hundred rounds: {name}")
            sides.warm_up(name)
        parts = {
            fault: found.setdefault((config.concurrency, fault), Found([], [], [], True)) for fault in config.faults
        }
        for index in range(config.repetitions):
            speeds = {name: sides.load(name).tokens_per_s for name in (names if index % 2 == 0 else reversed(names))}
            for fault, one in parts.items():
                one.with_it.append(speeds[fault])
                one.without.append(speeds[WITHOUT])
                one.identical = one.identical and not {fault, WITHOUT} & sides.differing
            # A measurement that is cut short has been one as far as it came.
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{NAME}.json").write_text(json.dumps({"found": _facts(found)}))
            say(f"{index + 1} of {config.repetitions}")
        for fault, one in parts.items():
            one.left_out.append(sides.left_out(fault))


def _facts(found: Table) -> dict[int, dict[str, Any]]:
    facts: dict[int, dict[str, Any]] = {}
    for (concurrency, fault), one in found.items():
        facts.setdefault(concurrency, {})[fault] = asdict(one)
    return facts


def earlier() -> Table:
    """What the result file holds; nothing without one."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return {}
    kept: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text())["found"]
    return {(int(at), fault): Found(**one) for at, faults in kept.items() for fault, one in faults.items()}


def row(concurrency: int, fault: str, one: Found) -> Sequence[object]:
    reasons = " / ".join(sorted({reason or "asked" for reason in one.left_out})) or "not looked at"
    sides_text = [Interval.of(speeds).text(1) for speeds in (one.without, one.with_it)]
    identical = "yes" if one.identical else "NO"
    return (fault, concurrency, len(one.with_it), *sides_text, one.ratio.text(3), one.verdict, reasons, identical)


def main() -> int:
    config = load_config(RealConfig, sys.argv[1:], prog="python -m bench.misbehaving_real", description=__doc__ or "")
    found = earlier() if config.keep or config.report_only else {}
    if not config.report_only:
        measured(config, found)
    if not found:
        say("nothing measured")
        return 1
    found = dict(sorted(found.items(), key=lambda plan: plan[0][0]))
    publish(NAME, HEADER, [row(*plan, one) for plan, one in found.items()], {"found": _facts(found)})
    return 0 if all(one.identical and one.verdict == "reached" for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
