"""Drafting on against off under load: the whole system at several concurrencies, over HTTP, in turns.

    python -m bench.load [--concurrency 1,4,16,64] [--fixed 2,4,8] [--repetitions 7] [--prompts FILE [--held-out]]

The whole system as processes on this machine, as in `moot demo`. A load is `concurrency` callers, each of which asks
for its next answer when it has one (eight answers at least in all, their prompts spread over all there are), greedy and
of equal length. Loads with K chosen by the policy, with drafting off (K = 0) and with each fixed K take turns. Every
ratio is one of interleaved pairs; tokens/s count everything from the first request sent to the last token. Answers are
compared id by id. With --keep, figures of other concurrencies stay from the result file, so that a long table can be
measured in parts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.driving.prompts import read_prompts
from lab.bench.driving.streams import Reply, closed_loop
from lab.bench.driving.watched import lengths_asked, metrics_of
from lab.bench.intervals import Interval, ratios
from lab.bench.report import RESULTS, publish
from moot.commands.common import say
from moot.commands.system import System, SystemConfig, running
from moot.config import load_config, option

POLICY, OFF = "policy", "K = 0"
POLL_S = 0.25
LEAST_ANSWERS = 8
HEADER = (
    *("concurrency", "tokens/s off", "policy of off", "best fixed", "policy of best fixed", "mean K"),
    *("K changes per 1,000 rounds", "TTFT of off", "token latency of off", "identical"),
)


@dataclass(frozen=True, kw_only=True)
class LoadConfig(SystemConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    prompts: Path | None = option(None, help="JSON lines with `turns` or `prompt`; none: the repository's own")
    held_out: bool = option(False, help="of the file only questions whose id ends in 7")
    limit: int = option(64, help="prompts taken from the file, evenly spread over it")
    concurrency: tuple[str, ...] = option(("1", "4", "16", "64"), help="callers at a time")
    fixed: tuple[str, ...] = option(("2", "4", "8"), help="fixed K of the sweep, beside 0")
    repetitions: int = option(7, help="loads of each kind at each concurrency")
    max_tokens: int = option(48, help="tokens of each answer")
    keep: bool = option(False, help="keep figures of other concurrencies from the result file")


@dataclass(frozen=True, slots=True)
class Run:
    """One load. Seconds; `lengths`: rounds by K asked for; `steps`: verify steps and their requests and tokens."""

    tokens_per_s: float
    first_token_s: float
    token_gap_s: float
    token_gap_p95_s: float
    rounds: float
    changes: float
    lengths: dict[int, float]
    batch_requests: float
    step_s: float
    texts: dict[str, tuple[int, ...]]


class Loads:
    """Makes loads on a running system. `model`: its name."""

    def __init__(self, system: System, prompts: Mapping[str, str], max_tokens: int) -> None:
        self._system = system
        self._model = system.client.models()[0]
        self._prompts = list(prompts.items())
        self._max_tokens = max_tokens

    def run(self, concurrency: int, asked: int | None) -> Run:
        """Raises RequestBroken. `asked`: fixed K, None for the policy's."""
        self._system.supervisor.check()
        number = max(concurrency, LEAST_ANSWERS)
        known = self._prompts
        chosen = [known[index * max(len(known), number) // number % len(known)] for index in range(number)]
        bodies = [(name, self._body(prompt, asked)) for name, prompt in chosen]
        router, verifier = self._router_port, int(self._system.verifier.facts["metrics_port"])
        before, steps_before = metrics_of(router), metrics_of(verifier)
        replies, seconds = asyncio.run(closed_loop(self._system.url, bodies, concurrency))
        after, steps_after = metrics_of(router), metrics_of(verifier)
        gaps = sorted(gap for reply in replies for gap in reply.token_gaps)

        def moved(name: str, new: Mapping[Any, float] = after, old: Mapping[Any, float] = before) -> float:
            return new.get((name, ""), 0.0) - old.get((name, ""), 0.0)

        steps = max(moved("moot_forward_seconds_count", steps_after, steps_before), 1.0)
        return Run(
            sum(len(reply.token_ids) for reply in replies) / seconds,
            statistics.median(reply.first_token_s for reply in replies),
            statistics.fmean(gaps),
            gaps[int(0.95 * len(gaps))],
            moved("moot_rounds_total"),
            moved("moot_speculation_length_changes_total"),
            lengths_asked(before, after),
            moved("moot_verify_batch_size_sum", steps_after, steps_before) / steps,
            moved("moot_forward_seconds_sum", steps_after, steps_before) / steps,
            _texts(replies),
        )

    def watched(self, concurrency: int) -> list[tuple[float, float]]:
        """(seconds, mean K asked for since the last look) during a load with the policy; not one that is measured."""
        found: list[tuple[float, float]] = []
        ended = threading.Event()

        def look() -> None:
            before, at = metrics_of(self._router_port), 0.0
            while not ended.wait(POLL_S):
                after, at = metrics_of(self._router_port), at + POLL_S
                lengths = lengths_asked(before, after)
                if total := sum(lengths.values()):
                    found.append((at, sum(length * count for length, count in lengths.items()) / total))
                before = after

        thread = threading.Thread(target=look)
        thread.start()
        try:
            self.run(concurrency, None)
        finally:
            ended.set()
            thread.join()
        return found

    @property
    def _router_port(self) -> int:
        return int(self._system.router.facts["metrics_port"])

    def _body(self, prompt: str, asked: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
        }
        return body if asked is None else body | {"num_speculative_tokens": asked}


def _texts(replies: Sequence[Reply]) -> dict[str, tuple[int, ...]]:
    texts: dict[str, tuple[int, ...]] = {}
    for reply in replies:
        if texts.setdefault(reply.name, reply.token_ids) != reply.token_ids:
            raise RuntimeError(f"{reply.name} was answered in two ways within one load")
    return texts


def measure(loads: Loads, config: LoadConfig, concurrency: int) -> dict[str, Any]:
    modes: dict[str, int | None] = {POLICY: None, OFF: 0} | {f"K = {text}": int(text) for text in config.fixed if text}
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    for asked in (None, *modes.values(), None):
        loads.run(concurrency, asked)
    for index in range(config.repetitions):
        for name in list(modes) if index % 2 == 0 else reversed(modes):
            runs[name].append(run := loads.run(concurrency, modes[name]))
            mean = sum(k * count for k, count in run.lengths.items()) / max(sum(run.lengths.values()), 1)
            say(
                f"{concurrency} callers, {index + 1}/{config.repetitions} {name:<7} {run.tokens_per_s:7.1f} tokens/s"
                f"  mean K {mean:.2f}  step {1e3 * run.step_s:.0f} ms of {run.batch_requests:.1f} requests"
            )
    texts = {run.texts[name] for one in runs.values() for run in one for name in run.texts}
    wanted = len(runs[OFF][0].texts)
    kept = {
        name: [{key: getattr(run, key) for key in Run.__slots__ if key != "texts"} for run in one]
        for name, one in runs.items()
    }
    return {"runs": kept, "identical": len(texts) == wanted, "mean_k": loads.watched(concurrency)}


def speeds(found: Mapping[str, Any], mode: str, key: str = "tokens_per_s") -> list[float]:
    return [run[key] for run in found["runs"][mode]]


def best_fixed(found: Mapping[str, Any]) -> str:
    return max(
        (name for name in found["runs"] if name != POLICY), key=lambda name: Interval.of(speeds(found, name)).median
    )


def row(concurrency: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    best = best_fixed(found)
    against = ratios(speeds(found, POLICY), speeds(found, best))
    on_off = ratios(speeds(found, POLICY), speeds(found, OFF))
    policy = found["runs"][POLICY]
    rounds = sum(run["rounds"] for run in policy)
    asked = sum(int(k) * count for run in policy for k, count in run["lengths"].items())
    return (
        concurrency,
        Interval.of(speeds(found, OFF)).text(1),
        f"{on_off.text()} {on_off.verdict(at_least=0.95)}",
        best,
        f"{against.text()} {against.verdict(at_least=0.95)}",
        f"{asked / max(rounds, 1):.2f}",
        f"{1000 * sum(run['changes'] for run in policy) / max(rounds, 1):.0f}",
        ratios(speeds(found, POLICY, "first_token_s"), speeds(found, OFF, "first_token_s")).text(),
        ratios(speeds(found, POLICY, "token_gap_s"), speeds(found, OFF, "token_gap_s")).text(),
        "yes" if found["identical"] else "NO",
    )


def draw(figure: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    # Parts of a kept table may have tried other fixed lengths.
    names = [name for name in next(iter(found.values()))["runs"] if all(name in one["runs"] for one in found.values())]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        cells = [ratios(speeds(one, name), speeds(one, OFF)) for one in found.values()]
        left.bar(
            [index + (place - (len(names) - 1) / 2) * width for index in range(len(cells))],
            [cell.median for cell in cells],
            width,
            yerr=[[c.median - c.low for c in cells], [c.high - c.median for c in cells]],
            label=name,
        )
    left.axhline(1, color="grey", linewidth=0.8)
    left.set_xticks(range(len(found)), list(found))
    left.set(xlabel="callers at a time", ylabel="tokens/s of drafting off")
    left.legend()
    for concurrency, one in found.items():
        if one["mean_k"]:
            right.plot(*zip(*one["mean_k"], strict=True), marker=".", label=f"{concurrency} callers")
    right.set(xlabel="seconds into a load", ylabel="mean K chosen by the policy", ylim=(-0.2, 8.2))
    right.legend()


def main() -> int:
    config = load_config(LoadConfig, sys.argv[1:], prog="python -m bench.load", description=__doc__ or "")
    kept = RESULTS / "load.json"
    found: dict[str, Any] = json.loads(kept.read_text())["found"] if config.keep and kept.exists() else {}
    with running(config, "load", say) as system:
        loads = Loads(
            system, read_prompts(config.prompts, config.limit, only_held_out=config.held_out), config.max_tokens
        )
        for concurrency in config.concurrency:
            found[concurrency] = measure(loads, config, int(concurrency))
    found = {key: found[key] for key in sorted(found, key=int)}
    rows = [row(concurrency, one) for concurrency, one in found.items()]
    publish("load", HEADER, rows, {"found": found}, lambda figure: draw(figure, found))
    return 0 if all(one["identical"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
