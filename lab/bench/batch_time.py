"""Time of one step of several requests, with the attention of all in one call and with a call for each.

    python -m bench.batch_time --model PATH [--context 200] [--rounds 11] [--threads 2]

By torch's operations: compiled kernels compute all rows of a step in one call anyway. Everything else of the step is
the same, and so are its numbers. Both ways take turns in one process, and each ratio is
one of interleaved pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab.bench.intervals import Interval, interleaved, ratios
from lab.bench.report import publish
from lab.bench.verify_time import CHUNK, MODES, timed
from moot.model.backend import plain_runner
from moot.model.cache.base import KvCache
from moot.model.cache.contiguous import PAGE_SLOTS, round_up
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.rows import RowRules
from moot.model.runner import ModelRunner

TREE = (-1, 0, 1, 2, 3, 0, 5, 1, 7)
"""Parents: three paths below one root, of five, three and four nodes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `requests`, each with so many rows, the root counted."""

    requests: int
    rows: int
    is_tree: bool = False

    @property
    def name(self) -> str:
        if self.is_tree:
            return f"{self.requests} trees of {self.rows}"
        return f"{self.requests} x {self.rows}"


SHAPES = (
    Shape(64, 1),
    Shape(16, 1),
    Shape(1, 1),
    Shape(16, 5),
    Shape(1, 9),
    Shape(16, len(TREE), True),
    Shape(4, len(TREE), True),
)

WAYS = ("one by one", "together")


def key(mode: str, shape: Shape, way: str) -> str:
    return f"{mode}, {shape.name}, {way}"


def filled_caches(runner: ModelRunner, context: int, count: int) -> list[KvCache]:
    """Of texts of `context` tokens, and room for one step more."""
    ids = [(7 * index + 13) % runner.info.vocab_size for index in range(context)]
    caches = [runner.new_cache() for _ in range(count)]
    for cache in caches:
        for start in range(0, context, CHUNK):
            chunk = ids[start : start + CHUNK]
            runner.forward([SequenceInput(cache, chunk)])
            cache.commit(range(len(chunk)))
    return caches


def step(runner: ModelRunner, rules: RowRules, shape: Shape, caches: Sequence[KvCache]) -> Callable[[], float]:
    """Milliseconds of one step, of which nothing is kept."""
    taken = caches[: shape.requests]
    parents = TREE if shape.is_tree else None
    inputs = [SequenceInput(cache, range(shape.rows), parents, range(shape.rows)) for cache in taken]

    def once() -> None:
        runner.rules = rules
        runner.forward(inputs)
        for cache in taken:
            cache.commit(())

    return lambda: timed(once)


def all_steps(arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Raises SystemExit where several requests' attention is never one call."""
    loaded = load_model(arguments.model, device="cpu", dtype="bfloat16", num_threads=arguments.threads, native=False)
    most = max(shape.requests for shape in SHAPES)
    found: dict[str, Callable[[], float]] = {}
    for mode, deterministic in MODES:
        runner = plain_runner(loaded, most * round_up(arguments.context + len(TREE), PAGE_SLOTS), deterministic)
        if not runner.rules.together:
            raise SystemExit(f"for this model on this machine there is one way only in {mode} mode: one by one")
        caches = filled_caches(runner, arguments.context, most)
        for shape in SHAPES:
            for way in WAYS:
                rules = replace(runner.rules, together=way == "together")
                found[key(mode, shape, way)] = step(runner, rules, shape, caches)
    return found


def summary(times: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for shape in SHAPES:
        for mode, _ in MODES:
            apart, together = (times[key(mode, shape, way)] for way in WAYS)
            both = (Interval.of(apart).text(1), Interval.of(together).text(1))
            rows.append((shape.name, mode, *both, ratios(together, apart).text()))
    return rows


def draw(times: Mapping[str, Sequence[float]], context: int, figure: Any) -> None:
    axes = figure.subplots()
    places = range(len(SHAPES))
    width = 0.8 / len(MODES)
    for number, (mode, _) in enumerate(MODES):
        found = [ratios(*(times[key(mode, shape, way)] for way in reversed(WAYS))) for shape in SHAPES]
        around = [[each.median - each.low for each in found], [each.high - each.median for each in found]]
        middles = [place + (number - (len(MODES) - 1) / 2) * width for place in places]
        axes.bar(middles, [each.median for each in found], width, yerr=around, capsize=3, label=mode)
    axes.axhline(1.0, color="gray", linestyle=":")
    axes.set(ylabel="step together, of one by one", xlabel=f"requests x rows, {context} slots taken", ylim=(0, None))
    axes.set_xticks(places, [shape.name for shape in SHAPES])
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    times = interleaved(all_steps(arguments), arguments.rounds, warm_up=1)
    publish(
        "batch_time",
        ("step (requests x rows)", "mode", "one by one, ms (95 %)", "together, ms (95 %)", "together of one by one"),
        summary(times),
        {
            "context": arguments.context,
            "threads": arguments.threads,
            "times_ms": times,
        },
        lambda figure: draw(times, arguments.context, figure),
    )


if __name__ == "__main__":
    main()
