"""What a branch costs: one forward pass over a draft of the same tokens as a chain and as trees of several paths.

    python -m bench.branch_time --model PATH [--tokens 8] [--leaves 1 2 3 4 6] [--context 200] [--rounds 11]

Deterministic mode, bfloat16, one request. A tree of n leaves is a chain from the root with n - 1 single tokens beside
its first ones. In deterministic mode each path of a tree attends by itself, over the slots that a chain would have, so
that the sums come in the same order; everything else is one product for all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from lab.bench.intervals import Interval, interleaved, ratios
from lab.bench.report import publish
from lab.bench.verify_time import CHUNK, timed
from moot.core.types import ROOT
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner


def comb(num_tokens: int, num_leaves: int) -> list[int]:
    """Parents of the root row and `num_tokens` draft tokens behind it, in `num_leaves` paths."""
    spine = num_tokens - (num_leaves - 1)
    if not 1 <= num_leaves <= spine:
        raise ValueError(f"{num_tokens} tokens have no {num_leaves} paths of this form")
    # Row 0 is the last committed token; a side token stands beside the first token of the spine, the second, ...
    return [ROOT, *range(spine), *range(num_leaves - 1)]


def tree_pass(runner: ModelRunner, context: int, parents: list[int]) -> Callable[[], None]:
    ids = [(7 * index + 13) % runner.info.vocab_size for index in range(context)]
    cache = runner.new_cache()
    for start in range(0, context, CHUNK):
        chunk = ids[start : start + CHUNK]
        runner.forward([SequenceInput(cache, chunk)])
        cache.commit(range(len(chunk)))
    item = SequenceInput(cache, ids[: len(parents)], parents, range(len(parents)))

    def once() -> None:
        runner.forward([item])
        cache.commit(())

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8, help="draft tokens")
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model, device="cpu", dtype="bfloat16", num_threads=arguments.threads)
    runner = plain_runner(loaded, (arguments.context + 1024) * (len(arguments.leaves) + 2), True)
    shapes = {"1 row": [ROOT]} | {
        f"{arguments.tokens} tokens, {leaves} path{'s' * (leaves > 1)}": comb(arguments.tokens, leaves)
        for leaves in arguments.leaves
    }
    passes = {name: tree_pass(runner, arguments.context, parents) for name, parents in shapes.items()}
    times = interleaved({name: partial(timed, once) for name, once in passes.items()}, arguments.rounds, warm_up=2)
    publish(
        "branch_time",
        ("draft", "median ms (95 %)", "of 1 row"),
        [(name, Interval.of(found).text(1), ratios(found, times["1 row"]).text()) for name, found in times.items()],
        {"context": arguments.context, "threads": arguments.threads, "times_ms": times},
    )


if __name__ == "__main__":
    main()
