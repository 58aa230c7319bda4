"""Forward passes of one process that take turns: caches filled with a context, and passes of which nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lab.bench.harness.arms import Runs, calls_in_turns
from lab.bench.harness.pages import BenchConfig
from moot.config import option
from moot.model.cache.kv_cache import KvCache
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner

CHUNK = 128
MS = "ms"
MODES = (("natural", False), ("batch_invariant", True))
Pass = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class PassConfig(BenchConfig):
    model: str = option(help="folder of a model")
    repetitions: int = option(11, help="turns of every pass that count")
    threads: int = option(0, help="compute threads; 0: torch's choice")

    def set_threads(self) -> int:
        """How many threads compute from now on."""
        if self.threads:
            torch.set_num_threads(self.threads)
        return torch.get_num_threads()


def ids_of(runner: ModelRunner, count: int) -> list[int]:
    return [(7 * index + 13) % runner.info.vocab_size for index in range(count)]


def filled(runner: ModelRunner, context: int, count: int = 1) -> list[KvCache]:
    """`count` caches that hold `context` tokens each."""
    ids = ids_of(runner, context)
    caches = [runner.new_cache() for _ in range(count)]
    for cache in caches:
        for start in range(0, context, CHUNK):
            chunk = ids[start : start + CHUNK]
            runner.forward([SequenceInput(cache, chunk)])
            cache.commit(range(len(chunk)))
    return caches


def step(runner: ModelRunner, caches: Sequence[KvCache], rows: int, parents: Sequence[int] | None = None) -> Pass:
    """One forward of `rows` rows for each cache, a chain or the tree of `parents`."""
    inputs = [SequenceInput(cache, ids_of(runner, rows), parents, range(rows)) for cache in caches]

    def once() -> None:
        runner.forward(inputs)
        for cache in caches:
            cache.commit(())

    return once


def timed(once: Pass) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    once()
    return 1e3 * (time.perf_counter() - begin)


def times(passes: Mapping[str, Pass], repetitions: int, warm_up: int = 2) -> Runs:
    """The figure MS of every pass, in turns."""
    calls = {name: partial(_figures, once) for name, once in passes.items()}
    return Runs(calls_in_turns(calls, repetitions, warm_up))


def _figures(once: Pass) -> dict[str, float]:
    return {MS: timed(once)}
