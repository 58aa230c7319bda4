"""gpu_check: time of a pass against the time to read the weights once, and of a whole verify step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lab.bench.gpu_check.subject import Subject
from lab.bench.harness.arms import calls_in_turns
from lab.bench.harness.intervals import Interval, ratios
from moot.core.history import History
from moot.core.types import SamplingParams
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.gpu.pool import PagedCache
from moot.model.inputs import SequenceInput
from moot.model.sampling.batch import BatchSampler, RowSpec
from moot.model.sampling.sampler import Sampler

Facts = list[tuple[str, str]]

ROUNDS = 9
ROW_COUNTS = (1, 2, 5, 9, 16, 32)
CONTEXTS = (200, 1000)


def rows(subject: Subject) -> Facts:
    """Medians of T(n) in ms, and its ratio to the floor within one round."""
    runner = subject.big_runner()
    words = [weight.detach().reshape(-1).view(torch.int32) for weight in runner.lean.weights]
    passes: dict[str, Callable[[], float]] = {"floor": lambda: _timed(subject, lambda: [word.sum() for word in words])}
    for context in CONTEXTS:
        cache = _filled(subject, runner, context)
        for count in ROW_COUNTS:
            item = SequenceInput(cache, [7] * count, None, range(count))
            passes[f"T({count}) at context {context}"] = _pass(subject, runner, cache, item)
    times = calls_in_turns(passes, ROUNDS, warm_up=2, say=lambda text: subject.tick())
    num_bytes = sum(word.numel() * 4 for word in words)
    facts = [
        ("graphs recorded", str(len(runner.graphs) if runner.graphs is not None else 0)),
        ("bytes of weights / floor", f"{num_bytes / Interval.of(times['floor']).median / 1e9:.0f} GB/s"),
        ("floor", f"{Interval.of([1e3 * value for value in times['floor']]).text(3)} ms"),
    ]
    for name, values in times.items():
        if name != "floor":
            milliseconds = Interval.of([1e3 * value for value in values]).text(3)
            facts.append((name, f"{milliseconds} ms, {ratios(values, times['floor']).text()} of the floor"))
    return facts


def step(subject: Subject) -> Facts:
    """16 requests of 5 rows at context 1000, greedy and sampled: pass, ids of all rows, one fetch."""
    runner = subject.big_runner()
    caches = [_filled(subject, runner, 200 if subject.is_small else 1000) for _ in range(16)]
    inputs = [SequenceInput(cache, [7, 8, 9, 10, 11], None, range(5)) for cache in caches]
    sampler = BatchSampler(Sampler(runner.info.vocab_size, frozenset()))

    def once(params: SamplingParams) -> float:
        begin = time.perf_counter()
        logits = torch.cat(runner.forward(inputs))
        specs = [RowSpec(params, 1000 + row % 5, History([1, 2, 3])) for row in range(80)]
        drawn = sampler.draw(logits, specs)
        seconds = time.perf_counter() - begin
        assert all(one.token_id is not None for one in drawn)
        for cache in caches:
            cache.commit(())
        subject.tick()
        return seconds

    def forward_alone() -> float:
        seconds = _timed(subject, lambda: runner.forward(inputs))
        for cache in caches:
            cache.commit(())
        return seconds

    times = calls_in_turns(
        {
            "pass alone": forward_alone,
            "step, greedy": lambda: once(SamplingParams(temperature=0.0)),
            "step, temperature 0.8": lambda: once(SamplingParams(temperature=0.8, seed=3)),
            "step, temperature 0.8 and top-p 0.95": lambda: once(SamplingParams(temperature=0.8, top_p=0.95, seed=3)),
        },
        ROUNDS,
        warm_up=2,
        say=lambda text: None,
    )
    for cache in caches:
        cache.free()
    return [(name, f"{Interval.of([1e3 * value for value in values]).text(3)} ms") for name, values in times.items()]


def _pass(subject: Subject, runner: GpuRunner, cache: PagedCache, item: SequenceInput) -> Callable[[], float]:
    def once() -> float:
        seconds = _timed(subject, lambda: runner.forward([item]))
        cache.commit(())
        return seconds

    return once


@torch.inference_mode()
def _timed(subject: Subject, compute: Callable[[], object]) -> float:
    subject.wait()
    begin = time.perf_counter()
    compute()
    subject.wait()
    return time.perf_counter() - begin


def _filled(subject: Subject, runner: GpuRunner, context: int) -> PagedCache:
    cache = runner.new_cache()
    for start in range(0, context, 500):
        count = min(500, context - start)
        runner.forward([SequenceInput(cache, [start % 256 + 1] * count, None, ())])
        cache.commit(range(count))
        subject.tick()
    return cache
