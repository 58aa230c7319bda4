"""The check behind deterministic mode: the same tokens in different company, compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moot.model.determinism import tiled, tiled_linear
from moot.model.kv import PAGE_SLOTS, KvPool, SequenceCache

if TYPE_CHECKING:
    from moot.model.runner import ModelRunner

_PROBE_TOKENS = 40


def find_difference(runner: ModelRunner) -> str | None:
    """None when rows come out equal in all company tried, else where they differ. Well under a second for small
    models: every shape of matrix product once, then whole passes over 40 tokens in different chunks."""
    for weight in _distinct_weights(runner):
        if counts := _differing_row_counts(runner, weight):
            return f"products with a weight of shape {list(weight.shape)} differ at {counts} rows"
    return _differing_pass(runner)


def _distinct_weights(runner: ModelRunner) -> list[Tensor]:
    linears = (module for module in runner.loaded.model.modules() if isinstance(module, torch.nn.Linear))
    return list({module.weight.shape: module.weight for module in linears}.values())


@torch.inference_mode()
def _differing_row_counts(runner: ModelRunner, weight: Tensor) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(runner.rules.tile, weight.shape[1], generator=generator).to(weight)
    differing = []
    with tiled(runner.rules, lambda: None):
        whole = tiled_linear(rows, weight, None)
        for count in (1, 2, 3, 5, 9, 16, 31):
            # The last `count` rows: so each is also compared at another place in its tile.
            if not torch.equal(tiled_linear(rows[-count:], weight, None), whole[-count:]):
                differing.append(count)
    return differing


def _differing_pass(runner: ModelRunner) -> str | None:
    limit = min(_PROBE_TOKENS, runner.info.context_limit)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(runner.info.vocab_size, (limit,), generator=generator).tolist()
    whole = _run(runner, token_ids, [limit])
    for chunks in ([limit - 8, 1, 1, 2, 4], [7, limit - 7], [limit - 17, 17]):
        chunks = [size for size in chunks if size > 0]
        if sum(chunks) == limit and not torch.equal(_run(runner, token_ids, chunks), whole):
            return f"the same {limit} tokens differ when computed in chunks of {chunks}"
    return None


def _run(runner: ModelRunner, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    from moot.model.runner import SequenceInput

    cache = SequenceCache(KvPool(runner.pool.shape, PAGE_SLOTS))
    start, logits = 0, []
    for size in chunks:
        wanted = [row for row in range(size) if start + row >= len(token_ids) - 8]
        logits += runner.forward([SequenceInput(cache, token_ids[start : start + size], None, wanted)])
        cache.commit(range(size))
        start += size
    return torch.cat(logits)
