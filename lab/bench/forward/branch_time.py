"""What a branch costs: one forward pass over a draft of the same tokens as a chain and as trees of several paths.

    python -m lab.bench.branch_time --model PATH [--tokens 8] [--leaves 1,2,3,4] [--context 200] [--repetitions 11]

Batch-invariant mode, bfloat16, one request. A tree of n leaves is a chain from the root with n - 1 single tokens beside
its first ones. In batch-invariant mode each path of a tree attends by itself, over the slots that a chain would have,
so that the sums come in the same order; everything else is one product for all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.harness.arms import Column, table_of
from lab.bench.harness.pages import Bench
from lab.bench.harness.passes import MS, PassConfig, filled, step, times
from moot.config import option
from moot.core.types import ROOT
from moot.model.backend import plain_runner
from moot.model.loading.load import load_model

BENCH = Bench("branch_time", __doc__, measures=("moot/model",))
ONE = "1 row"
COLUMNS = (Column("median ms (95 %)", MS, 1), Column("of 1 row", MS, base=ONE))


@dataclass(frozen=True, kw_only=True)
class Config(PassConfig):
    tokens: int = option(8, help="draft tokens")
    leaves: tuple[int, ...] = option((1, 2, 3, 4), help="paths of the draft")
    context: int = option(200, help="tokens in the cache")


def comb(num_tokens: int, num_leaves: int) -> list[int]:
    """Parents of the root row and `num_tokens` draft tokens behind it, in `num_leaves` paths."""
    spine = num_tokens - (num_leaves - 1)
    if not 1 <= num_leaves <= spine:
        raise ValueError(f"{num_tokens} tokens have no {num_leaves} paths of this form")
    # Row 0 is the last committed token; a side token stands beside the first token of the spine, the second, ...
    return [ROOT, *range(spine), *range(num_leaves - 1)]


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    threads = config.set_threads()
    loaded = load_model(config.model, device="cpu", dtype="bfloat16", num_threads=threads)
    runner = plain_runner(loaded, (config.context + 1024) * (len(config.leaves) + 2), True)
    shapes = {ONE: [ROOT]}
    for leaves in config.leaves:
        shapes[f"{config.tokens} tokens, {leaves} path{'s' * (leaves > 1)}"] = comb(config.tokens, leaves)
    passes = {
        name: step(runner, filled(runner, config.context), len(parents), parents) for name, parents in shapes.items()
    }
    runs = times(passes, config.repetitions)
    facts = {"context": config.context, "threads": threads, "runs": runs.of}
    BENCH.publish(config, table_of(runs, "draft", COLUMNS), facts, COLUMNS[0].title, argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
