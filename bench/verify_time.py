"""Time of one forward pass for 1, 2, 5, 9 and 16 rows of one request, natural and deterministic, interleaved.

    python -m bench.verify_time --model PATH [--context 200] [--rounds 15] [--threads 2]

Rows count the root: 9 rows verify 8 draft tokens. All figures are ratios to the natural one-row pass of the same run.
Beside it: transformers' own one-token forward with its cache, and the floor (time to stream all weights once).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from bench.report import publish, spread
from moot.model.load import load_model
from moot.model.runner import ModelRunner, SequenceInput

ROWS = (1, 2, 5, 9, 16)


def _runner_pass(runner: ModelRunner, context: int, rows: int) -> Callable[[], None]:
    cache = runner.new_cache()
    ids = [(7 * index + 13) % runner.info.vocab_size for index in range(context)]
    for start in range(0, context, 128):
        chunk = ids[start : start + 128]
        runner.forward([SequenceInput(cache, chunk)])
        cache.commit(range(len(chunk)))
    tokens = ids[:rows]

    def once() -> None:
        runner.forward([SequenceInput(cache, tokens, None, range(rows))])
        cache.commit(())

    return once


def _transformers_pass(path: str, dtype: torch.dtype, context: int) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        filled = model(torch.arange(context)[None], use_cache=True).cache

    @torch.inference_mode()
    def once() -> None:
        model(torch.tensor([[5]]), cache=filled, use_cache=True)
        filled.crop(-1)

    return once


def _floor(runner: ModelRunner) -> Callable[[], None]:
    # A sum reads each byte once, in order, and computes next to nothing; integers, because they have no NaN.
    weights = [parameter.data.view(torch.int16) for parameter in runner.loaded.model.parameters()]
    words = [weight.reshape(-1)[: weight.numel() // 4 * 4].view(torch.int64) for weight in weights]

    @torch.inference_mode()
    def once() -> None:
        for word in words:
            word.sum()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    passes: dict[str, Callable[[], None]] = {}
    capacity = 2 * len(ROWS) * (arguments.context + 1024)
    for mode, deterministic in (("natural", False), ("deterministic", True)):
        loaded = load_model(arguments.model, device="cpu", dtype=arguments.dtype, num_threads=arguments.threads)
        runner = ModelRunner(loaded, capacity, deterministic)
        for rows in ROWS:
            passes[f"{mode}, {rows} rows"] = _runner_pass(runner, arguments.context, rows)
    passes["transformers, 1 token with its cache"] = _transformers_pass(
        arguments.model, runner.dtype, arguments.context
    )
    passes["floor: weights streamed once"] = _floor(runner)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for index in range(arguments.rounds + 2):
        for name, once in passes.items():
            begin = time.perf_counter()
            once()
            if index >= 2:
                times[name].append(1e3 * (time.perf_counter() - begin))
    base = spread(times["natural, 1 rows"])[0]
    rows_out = []
    for name, values in times.items():
        middle, low, high = spread(values)
        rows_out.append((name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{middle / base:.2f}"))
    publish(
        "verify_time",
        ("pass", "median ms", "lowest to highest", "of natural 1 row"),
        rows_out,
        {"context": arguments.context, "threads": arguments.threads, "dtype": str(runner.dtype), "times_ms": times},
    )


if __name__ == "__main__":
    main()
