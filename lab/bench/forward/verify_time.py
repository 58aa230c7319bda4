"""Time of one forward pass for 1 to 16 rows of one request and for a batch, beside transformers' and the floor.

    python -m lab.bench.verify_time --model PATH [--contexts 200,1000] [--repetitions 15] [--threads 2]

Rows count the root: 9 rows verify 8 draft tokens. All passes take turns in one process, and each ratio is one of
interleaved pairs. Beside them: transformers' own one-token forward with its cache, the floor (time to stream all
weights once), and a step of several requests at once. The bounds are the project's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lab.bench.harness.arms import Runs
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.passes import MODES, MS, Pass, PassConfig, filled, ids_of, step, times
from moot.config import option
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner

BENCH = Bench("verify_time", __doc__, measures=("moot/model",))
ROWS = (1, 2, 5, 9, 16)
BOUNDS = {5: 1.05, 9: 1.12, 16: 1.25}
"""Most that so many batch-invariant rows may take of one natural row."""
OF_TRANSFORMERS, OF_FLOOR = 0.7, 2.0
"""Most that one natural row may take."""
FLOOR = "floor: weights streamed once"


@dataclass(frozen=True, kw_only=True)
class Config(PassConfig):
    contexts: tuple[int, ...] = option((200, 1000), help="tokens in the cache")
    requests: int = option(16, help="requests of the batch's step")
    repetitions: int = option(15, help="turns of every pass that count")
    dtype: str = option("bfloat16", help="number format")


def pass_name(mode: str, context: int, rows: int) -> str:
    return f"{mode}, context {context}, {rows} row{'s' * (rows > 1)}"


def prefill_pass(runner: ModelRunner, context: int) -> Pass:
    """The prompt in one chunk, into an empty cache."""
    cache, ids = runner.new_cache(), ids_of(runner, context)

    def once() -> None:
        runner.forward([SequenceInput(cache, ids, None, [context - 1])])
        cache.commit(())

    return once


def transformers_pass(model: Any, context: int) -> Pass:
    with torch.inference_mode():
        cache = model(torch.arange(context)[None], use_cache=True).cache

    @torch.inference_mode()
    def once() -> None:
        model(torch.tensor([[5]]), cache=cache, use_cache=True)
        cache.crop(-1)

    return once


def floor_pass(model: Any) -> Pass:
    # A sum reads each byte once, in order, and computes next to nothing; integers, because they have no NaN.
    weights = [parameter.data.view(torch.int16) for parameter in model.parameters()]
    words = [weight.reshape(-1)[: weight.numel() // 4 * 4].view(torch.int64) for weight in weights]

    @torch.inference_mode()
    def once() -> None:
        for word in words:
            word.sum()

    return once


def all_passes(config: Config, threads: int) -> dict[str, Pass]:
    loaded = load_model(config.model, device="cpu", dtype=config.dtype, num_threads=threads)
    plain = AutoModelForCausalLM.from_pretrained(config.model, dtype=loaded.kv_shape.dtype).eval()
    longest, first = max(config.contexts) + 1024, config.contexts[0]
    passes: dict[str, Pass] = {FLOOR: floor_pass(plain)}
    for mode, batch_invariant in MODES:
        runner = plain_runner(loaded, longest * (2 * len(ROWS) + config.requests + 2), batch_invariant)
        for context in config.contexts:
            for rows in ROWS:
                passes[pass_name(mode, context, rows)] = step(runner, filled(runner, context), rows)
        name = f"{mode}, context {first}, {config.requests} requests of 5 rows"
        passes[name] = step(runner, filled(runner, first, config.requests), 5)
        passes[f"{mode}, prompt of {first} tokens"] = prefill_pass(runner, first)
    for context in config.contexts:
        passes[f"transformers, context {context}"] = transformers_pass(plain, context)
    return passes


def summary(runs: Runs, contexts: Sequence[int]) -> list[Sequence[str]]:
    """Each pass with its ratio to the natural one-row pass of its context, then the other bounds. Of natural passes
    only those of one row, which ratios are of: the others have no bound, and are left to the JSON."""
    found: list[Sequence[str]] = []
    one_row = {pass_name("natural", context, 1) for context in contexts}
    for name in runs.of:
        if name.startswith("natural") and name not in one_row:
            continue
        context = next((one for one in contexts if f"context {one}" in name), contexts[0])
        ratio = runs.ratio(name, pass_name("natural", context, 1), MS)
        bound = next((BOUNDS[rows] for rows in BOUNDS if name == pass_name("batch_invariant", context, rows)), None)
        told = "" if bound is None else f"{bound}: {ratio.verdict(at_most=bound)}"
        shown = name.removeprefix(f"{MODES[1][0]}, ")
        found.append((shown, f"{runs.interval(name, MS).median:.1f}", ratio.text(), told))
    for context in contexts:
        for other, most in ((f"transformers, context {context}", OF_TRANSFORMERS), (FLOOR, OF_FLOOR)):
            ratio = runs.ratio(pass_name("natural", context, 1), other, MS)
            name = f"natural 1 row, context {context}, of {other.partition(':')[0].partition(',')[0]}"
            found.append((name, "", ratio.text(), f"{most}: {ratio.verdict(at_most=most)}"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    threads = config.set_threads()
    runs = times(all_passes(config, threads), config.repetitions)
    header = ("pass (batch-invariant, if not natural)", "median ms", "of natural 1 row", "at most")
    table = Table(header, summary(runs, config.contexts))
    facts = {"contexts": config.contexts, "threads": threads, "dtype": config.dtype, "runs": runs.of}
    BENCH.publish(config, table, facts, "of natural 1 row", argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
