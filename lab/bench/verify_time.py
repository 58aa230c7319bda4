"""Time of one forward pass for 1 to 16 rows of one request and for a batch, beside transformers' and the floor.

    python -m bench.verify_time --model PATH [--contexts 200 1000] [--rounds 15] [--threads 2]

Rows count the root: 9 rows verify 8 draft tokens. All passes take turns in one process, and each ratio is one of
interleaved pairs. Beside them: transformers' own one-token forward with its cache, the floor (time to stream all
weights once), and a step of several requests at once. The bounds are the project's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lab.bench.intervals import Interval, interleaved, ratios
from lab.bench.report import publish
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner

ROWS = (1, 2, 5, 9, 16)
MODES = (("natural", False), ("deterministic", True))
BOUNDS = {5: 1.05, 9: 1.12, 16: 1.25}
"""Most that so many deterministic rows may take of one natural row."""
OF_TRANSFORMERS, OF_FLOOR = 0.7, 2.0
"""Most that one natural row may take."""
CHUNK = 128
FLOOR = "floor: weights streamed once"


def timed(once: Callable[[], None]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    once()
    return 1e3 * (time.perf_counter() - begin)


def pass_name(mode: str, context: int, rows: int) -> str:
    return f"{mode}, context {context}, {rows} row{'s' * (rows > 1)}"


def runner_pass(runner: ModelRunner, context: int, rows: int, requests: int = 1) -> Callable[[], None]:
    ids = [(7 * index + 13) % runner.info.vocab_size for index in range(context)]
    caches = [runner.new_cache() for _ in range(requests)]
    for cache in caches:
        for start in range(0, context, CHUNK):
            chunk = ids[start : start + CHUNK]
            runner.forward([SequenceInput(cache, chunk)])
            cache.commit(range(len(chunk)))
    inputs = [SequenceInput(cache, ids[:rows], None, range(rows)) for cache in caches]

    def once() -> None:
        runner.forward(inputs)
        for cache in caches:
            cache.commit(())

    return once


def prefill_pass(runner: ModelRunner, context: int) -> Callable[[], None]:
    """The prompt in one chunk, into an empty cache."""
    cache = runner.new_cache()
    ids = [(7 * index + 13) % runner.info.vocab_size for index in range(context)]

    def once() -> None:
        runner.forward([SequenceInput(cache, ids, None, [context - 1])])
        cache.commit(())

    return once


def transformers_pass(model: Any, context: int) -> Callable[[], None]:
    with torch.inference_mode():
        filled = model(torch.arange(context)[None], use_cache=True).cache

    @torch.inference_mode()
    def once() -> None:
        model(torch.tensor([[5]]), cache=filled, use_cache=True)
        filled.crop(-1)

    return once


def floor_pass(model: Any) -> Callable[[], None]:
    # A sum reads each byte once, in order, and computes next to nothing; integers, because they have no NaN.
    weights = [parameter.data.view(torch.int16) for parameter in model.parameters()]
    words = [weight.reshape(-1)[: weight.numel() // 4 * 4].view(torch.int64) for weight in weights]

    @torch.inference_mode()
    def once() -> None:
        for word in words:
            word.sum()

    return once


def all_passes(arguments: argparse.Namespace) -> dict[str, Callable[[], None]]:
    loaded = load_model(arguments.model, device="cpu", dtype=arguments.dtype, num_threads=arguments.threads)
    plain = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=loaded.kv_shape.dtype).eval()
    longest = max(arguments.contexts) + 1024
    passes: dict[str, Callable[[], None]] = {FLOOR: floor_pass(plain)}
    for mode, deterministic in MODES:
        runner = plain_runner(loaded, longest * (2 * len(ROWS) + arguments.requests + 2), deterministic)
        for context in arguments.contexts:
            for rows in ROWS:
                passes[pass_name(mode, context, rows)] = runner_pass(runner, context, rows)
        first = arguments.contexts[0]
        passes[f"{mode}, context {first}, {arguments.requests} requests of 5 rows"] = runner_pass(
            runner, first, 5, arguments.requests
        )
        passes[f"{mode}, prompt of {first} tokens"] = prefill_pass(runner, first)
    for context in arguments.contexts:
        passes[f"transformers, context {context}"] = transformers_pass(plain, context)
    return passes


def summary(times: dict[str, list[float]], contexts: Sequence[int]) -> list[tuple[str, str, str, str, str]]:
    """Each pass with its ratio to the natural one-row pass of its context, then the other bounds."""
    rows_out = []
    for name, values in times.items():
        context = next((one for one in contexts if f"context {one}" in name), contexts[0])
        ratio = ratios(values, times[pass_name("natural", context, 1)])
        bound = next((BOUNDS[rows] for rows in BOUNDS if name == pass_name("deterministic", context, rows)), None)
        told = ("", "") if bound is None else (f"at most {bound}", ratio.verdict(at_most=bound))
        rows_out.append((name, Interval.of(values).text(1), ratio.text(), *told))
    for context in contexts:
        one = times[pass_name("natural", context, 1)]
        for other, most in ((f"transformers, context {context}", OF_TRANSFORMERS), (FLOOR, OF_FLOOR)):
            ratio = ratios(one, times[other])
            name = f"natural 1 row, context {context}, of {other.partition(':')[0].partition(',')[0]}"
            rows_out.append((name, "", ratio.text(), f"at most {most}", ratio.verdict(at_most=most)))
    return rows_out


def draw(times: dict[str, list[float]], contexts: Sequence[int], figure: Any) -> None:
    for place, axes in enumerate(figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]):
        context = contexts[place]
        for mode, _ in MODES:
            found = [Interval.of(times[pass_name(mode, context, rows)]) for rows in ROWS]
            below = [each.median - each.low for each in found]
            above = [each.high - each.median for each in found]
            axes.errorbar(ROWS, [each.median for each in found], [below, above], marker="o", capsize=3, label=mode)
        plain = Interval.of(times[f"transformers, context {context}"]).median
        axes.axhline(plain, color="tab:red", linestyle="--", label="transformers, 1 token")
        axes.axhline(Interval.of(times[FLOOR]).median, color="gray", linestyle=":", label="floor")
        axes.set(title=f"context {context}", xlabel="rows, the root counted", ylim=(0, None), xticks=ROWS)
    figure.axes[0].set_ylabel("one forward pass, ms")
    figure.axes[0].legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--requests", type=int, default=16, help="requests of the batch's step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    passes = all_passes(arguments)
    measurements = {name: partial(timed, once) for name, once in passes.items()}
    times = interleaved(measurements, arguments.rounds, warm_up=2)
    publish(
        "verify_time",
        ("pass", "median ms (95 %)", "of natural 1 row", "bound", "verdict"),
        summary(times, arguments.contexts),
        {"contexts": arguments.contexts, "threads": arguments.threads, "dtype": arguments.dtype, "times_ms": times},
        lambda figure: draw(times, arguments.contexts, figure),
    )


if __name__ == "__main__":
    main()
