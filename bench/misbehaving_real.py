"""The real part of bench/misbehaving.py: the whole system with a faulty drafter process more, and without it.

    python -m bench.misbehaving_real [--faults lie,delay:0.05,freeze,garbage] [--concurrency 4] [--repetitions 7]

One verifier and the drafters of `moot demo`; for each fault of services/drafter/faults.py a process of the kind
`suffix` that has it, and a router whose electorate has that one more; and one router without any. Loads take turns,
each on a router of its own, since what is left out is a router's to learn. First come a hundred rounds of each place
for a request. Ratios are of the loads of one turn; answers are compared id by id.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.driving.prompts import read_prompts
from bench.driving.routers import wait_serving
from bench.driving.streams import Reply, closed_loop
from bench.driving.watched import metrics_of
from bench.intervals import Interval, interleaved, ratios
from bench.report import publish
from moot.commands.common import say
from moot.commands.system import LOOPBACK, NO_STORE, System, SystemConfig, prepared_model, running
from moot.config import load_config, option
from moot.supervisor import Child
from services.drafter.faults import POINT

BOUND = 0.98
FIRST_ROUNDS = 100
WITHOUT = "without"
HEADER = ("fault", "tokens/s without", "with", "with / without (95 %)", "at least 0.98", "left out as", "identical")


@dataclass(frozen=True, kw_only=True)
class RealConfig(SystemConfig):
    port: int = option(0, help="port of the unused first router; 0 chooses a free one")
    redis_url: str | None = option(NO_STORE, help="'off': no records")
    faults: tuple[str, ...] = option(("lie", "delay:0.05", "freeze", "garbage"), help="one process for each")
    prompts: Path | None = option(None, help="JSON lines with `turns` or `prompt`; none: the repository's own")
    concurrency: int = option(4, help="callers at a time")
    answers: int = option(8, help="answers of a load")
    repetitions: int = option(7, help="loads of each")
    max_tokens: int = option(48, help="tokens of each answer")


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
        self._routers = {WITHOUT: self._router("router-without", {}, model)}
        for number, (fault, drafter) in enumerate(self._faulty.items()):
            self._routers[fault] = self._router(f"router-{number}", {f"faulty{number}": drafter}, model)
        supervisor.wait_ready(list(self._routers.values()), config.start_timeout_s)
        for router in self._routers.values():
            wait_serving(router)
        self.texts: dict[str, tuple[int, ...]] = {}
        self.differing: set[str] = set()

    def _drafter(self, fault: str, number: int, model: str) -> Child:
        flags = ["--kind", "suffix", "--drafter-id", f"faulty{number}", "--tokenizer", model]
        flags += ["--host", LOOPBACK, "--port", "0", "--metrics-port", "0", "--log-level", "error"]
        environ = {"MOOT_FAULTS": f"{POINT}={fault}", "OMP_NUM_THREADS": "1"}
        return self._system.supervisor.service(
            f"drafter-faulty{number}", "drafter", flags, environ=environ, essential=False
        )

    def _router(self, name: str, more: Mapping[str, Child], model: str) -> Child:
        config = self._config
        processes = {child.name.removeprefix("drafter-"): child for child in self._system.drafters} | dict(more)
        kinds = [(own or kind, kind) for kind, _, own in (entry.partition(":") for entry in config.drafters)]
        inside = [f"{own}={kind}" for own, kind in kinds if own not in processes]
        flags = ["--model", model, "--served-model-name", self._name, "--host", LOOPBACK, "--port", "0"]
        flags += ["--grpc-port", "0", "--metrics-port", "0", "--redis-url", "none", "--log-level", "error"]
        flags += ["--verifiers", f"{LOOPBACK}:{self._system.verifier.port}"]
        flags += ["--drafters", ",".join(f"{one}={LOOPBACK}:{child.port}" for one, child in processes.items())]
        flags += ["--in-process-drafters", ",".join(inside)]
        return self._system.supervisor.service(name, "router", flags)

    def load(self, side: str) -> tuple[float, int]:
        """One load: tokens/s, and rounds. Raises RequestBroken."""
        self._system.supervisor.check()
        config = self._config
        shared: dict[str, Any] = {"model": self._name, "temperature": 0, "ignore_eos": True}
        bodies = [
            (name, shared | {"max_tokens": config.max_tokens, "messages": [{"role": "user", "content": prompt}]})
            for name, prompt in self._prompts.items()
        ]
        url = f"http://{LOOPBACK}:{self._routers[side].port}"
        replies, seconds = asyncio.run(closed_loop(url, bodies, config.concurrency))
        for reply in replies:
            if self.texts.setdefault(reply.name, reply.token_ids) != reply.token_ids:
                self.differing.add(side)
        return sum(len(reply.token_ids) for reply in replies) / seconds, sum(map(_rounds, replies))

    def warm_up(self, side: str) -> None:
        """A hundred rounds for each place."""
        left = FIRST_ROUNDS * self._config.concurrency
        while left > 0:
            left -= self.load(side)[1]

    def left_out(self, side: str) -> str:
        """Why its router does not ask the faulty one; empty where it does."""
        number = list(self._faulty).index(side)
        samples = metrics_of(int(self._routers[side].facts["metrics_port"]))
        found = [
            labels
            for (name, labels), value in samples.items()
            if name == "moot_drafters_left_out" and value and f"faulty{number}" in labels.split(",")
        ]
        return ", ".join(labels.partition(",")[2] for labels in found)


def _rounds(reply: Reply) -> int:
    return int(reply.metrics["speculative_decoding"]["num_spec_steps"])


def measured(config: RealConfig) -> bool:
    with running(config, "misbehaving", say) as system:
        sides = Sides(system, config)
        names = [WITHOUT, *config.faults]
        for name in names:
            say(f"a hundred rounds: {name}")
            sides.warm_up(name)
        speeds = interleaved(
            {name: lambda name=name: sides.load(name)[0] for name in names},  # type: ignore[misc]
            config.repetitions,
            warm_up=0,
            say=say,
        )
        reasons = {fault: sides.left_out(fault) for fault in config.faults}
    rows, reached = [], True
    for fault in config.faults:
        ratio = ratios(speeds[fault], speeds[WITHOUT])
        # On a shared machine a median may lie a little below by chance: missed is what lies below as a whole.
        verdict = ratio.verdict(at_least=BOUND)
        reached = reached and verdict == "reached"
        identical = "NO" if {fault, WITHOUT} & sides.differing else "yes"
        sides_text = [Interval.of(speeds[name]).text(1) for name in (WITHOUT, fault)]
        rows.append((fault, *sides_text, ratio.text(3), verdict, reasons[fault] or "asked", identical))
    publish("misbehaving_real", HEADER, rows, {"tokens_per_s": speeds, "left_out": reasons})
    return reached and not sides.differing


def main() -> int:
    config = load_config(RealConfig, sys.argv[1:], prog="python -m bench.misbehaving_real", description=__doc__ or "")
    return 0 if measured(config) else 1


if __name__ == "__main__":
    sys.exit(main())
