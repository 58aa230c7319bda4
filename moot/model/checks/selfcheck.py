"""The check behind batch-invariant mode: which paddings make rows round alike on this machine, found bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moot.core.errors import ConfigError
from moot.core.types import ROOT
from moot.model.cache.contiguous import PAGE_SLOTS, SPAN_SLOTS, KvPool, SequenceCache
from moot.model.checks.decoder_check import decoder_rules
from moot.model.checks.rowcases import MOST_OUTPUTS, Case, cancelling, first_holding, of_rows
from moot.model.inputs import SequenceInput
from moot.model.layout import AttentionArguments
from moot.model.loading.load import LoadedModel
from moot.model.modules.attention import attend
from moot.model.modules.tiled_layers import SharedLinear, foreign_products
from moot.model.rows import TILE_ROWS, Padding, RowRules
from moot.model.runner import ModelRunner

# Cheapest first. Seen with torch 2.13: bfloat16 products have their own kernel for 1 row; float32 and float64 ones for
# 1, for 2 to 3 (elsewhere 2 to 12) and for what is left over a multiple of 4 (up to 12 rows; in float64 always).
# Attention has its own for 1 to 3 (elsewhere 4) rows.
_LINEAR_PADDINGS = {
    torch.bfloat16: (Padding(2, 1), Padding(4, 1), Padding(16, 16), Padding(32, 32)),
    torch.float32: (Padding(16, 16), Padding(32, 32)),
}
_ATTENTION_PADDINGS = {
    torch.float64: (Padding(4, 4), Padding(8, 8), Padding(16, 16), Padding(32, 32)),
    torch.float32: (Padding(4, 1), Padding(5, 1), Padding(8, 1), Padding(16, 16), Padding(32, 32)),
}
_PASS_TOKENS = 40
_BRANCHES = 3
"""Leaves between the first nodes of the tree's path."""


def find_rules(loaded: LoadedModel) -> RowRules:
    """The cheapest paddings under which rows round alike here. Raises ConfigError when there are none."""
    if loaded.decoder is not None:
        return decoder_rules(loaded.decoder, loaded.info.context_limit)
    if foreign := foreign_products(loaded.model):
        raise ConfigError(
            f"batch-invariant mode covers products of linear layers only; {loaded.info.model} also has {foreign[0]}"
        )
    dtype, generator = loaded.kv_shape.dtype, torch.Generator().manual_seed(0)
    products = [_linear_case(loaded, shape, generator) for shape in _distinct_shapes(loaded.model)]
    linear = first_holding(_LINEAR_PADDINGS.get(dtype, _LINEAR_PADDINGS[torch.float32]), products)
    if linear is None:
        raise ConfigError(f"batch-invariant mode does not hold: {dtype} matrix products depend on the number of rows")
    attentions = [
        _attention_case(loaded, slots, cancel_scores, generator)
        for slots in (SPAN_SLOTS, PAGE_SLOTS)
        for cancel_scores in (True, False)
    ]
    attention = first_holding(_ATTENTION_PADDINGS.get(dtype, _ATTENTION_PADDINGS[torch.float32]), attentions)
    if attention is None:
        raise ConfigError(f"batch-invariant mode does not hold: {dtype} attention depends on the number of rows")
    return RowRules(TILE_ROWS, linear, attention, True)


def check_passes(runner: ModelRunner) -> None:
    """Compare whole passes in different chunks, and as a tree: this covers what no other check does.

    Raises ConfigError."""
    limit = min(_PASS_TOKENS, runner.info.context_limit)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(runner.info.vocab_size, (limit,), generator=generator).tolist()
    whole = _last_logits(runner, token_ids, [limit])
    for chunks, branches in (([limit - 8, 1, 1, 2, 4], 0), ([limit - 17, 17], 0), ([limit - 8, 8], _BRANCHES)):
        if min(chunks) > 0 and not torch.equal(_last_logits(runner, token_ids, chunks, branches), whole):
            raise ConfigError(
                f"batch-invariant mode does not hold for {runner.info.model}: the same {limit} tokens give other"
                f" numbers in chunks of {chunks}{' as the path of a tree' if branches else ''}"
            )


def _distinct_shapes(model: nn.Module) -> list[tuple[int, int, bool]]:
    weights = [
        (module.product.weight, module.product.bias)
        if isinstance(module, SharedLinear)
        else (module.weight, module.bias)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    return sorted({(weight.shape[0], weight.shape[1], bias is not None) for weight, bias in weights})


def _linear_case(loaded: LoadedModel, shape: tuple[int, int, bool], generator: torch.Generator) -> Case:
    outputs, inputs, has_bias = min(shape[0], MOST_OUTPUTS), shape[1], shape[2]
    rows, weight = cancelling((TILE_ROWS,), (outputs,), inputs, generator)
    like = torch.empty(0, dtype=loaded.kv_shape.dtype, device=loaded.kv_shape.device)
    rows, weight = rows.to(like), weight.to(like)
    bias = like.new_zeros(outputs) if has_bias else None
    return Case(of_rows(lambda some: nn.functional.linear(some, weight, bias), rows))


def _attention_case(loaded: LoadedModel, slots: int, cancel_scores: bool, generator: torch.Generator) -> Case:
    """Scores that are nothing but rounding, scaled up; or equal scores over values that cancel."""
    shape, heads = loaded.kv_shape, loaded.num_heads
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    if cancel_scores:
        query, key = cancelling((heads, TILE_ROWS), (kv_heads, slots), dim, generator)
        value = torch.randn(kv_heads, slots, dim, generator=generator)
        scaling = 0.1 / torch.finfo(torch.promote_types(shape.dtype, torch.float32)).eps
    else:
        query, key = torch.zeros(heads, TILE_ROWS, dim), torch.randn(kv_heads, slots, dim, generator=generator)
        half = torch.randn(kv_heads, slots // 2, dim, generator=generator)
        value = torch.cat((half, -half), 1)[:, torch.randperm(slots, generator=generator)]
        scaling = 1.0
    like = torch.empty(0, dtype=shape.dtype, device=shape.device)
    query, key, value = query.to(like), key.to(like), value.to(like)
    mask = like.new_zeros(TILE_ROWS, slots)
    mask[:, slots - 12 :] = float("-inf")
    arguments = AttentionArguments(scaling, None, loaded.softcap)

    @torch.inference_mode()
    def compute(index: Tensor) -> Tensor:
        return attend(query[:, index], key, value, mask[index], arguments).transpose(0, 1)

    return Case(compute)


def _last_logits(runner: ModelRunner, token_ids: Sequence[int], chunks: Sequence[int], branches: int = 0) -> Tensor:
    """Logits of the last eight tokens, computed in chunks of these sizes; all but the first are trees with so many
    leaves between the first tokens."""
    cache = SequenceCache(KvPool(runner.pool.shape, PAGE_SLOTS))
    start, logits = 0, []
    for size in chunks:
        ids, parents, path = _with_branches(token_ids[start : start + size], branches if start else 0)
        wanted = [row for place, row in enumerate(path) if start + place >= len(token_ids) - 8]
        logits += runner.forward([SequenceInput(cache, ids, parents, wanted)])
        cache.commit(path)
        start += size
    return torch.cat(logits)


def _with_branches(token_ids: Sequence[int], branches: int) -> tuple[list[int], list[int], list[int]]:
    """A tree whose one long path is `token_ids`, with a leaf before each of the first `branches` of them: its ids,
    their parents, and where the path lies in it."""
    ids: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for place, token_id in enumerate(token_ids):
        siblings = [token_ids[-1 - place], token_id] if place < branches else [token_id]
        ids += siblings
        parents += [path[-1] if path else ROOT] * len(siblings)
        path.append(len(ids) - 1)
    return ids, parents, path
