"""Inputs of a forward pass, and the checks of them that every runner makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moot.core.errors import ContextLengthExceeded
from moot.core.types import ROOT
from moot.model.cache.kv_cache import KvCache, depths_of

CacheT = TypeVar("CacheT", bound=KvCache)


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Tokens to run for one request. `parents`: None for a chain that follows the cache, else per token the index of
    its parent in `token_ids`, or -1 for one that follows the cache. `logit_rows`: indices whose logits are wanted."""

    cache: KvCache
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    logit_rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CheckedInput(Generic[CacheT]):
    """An input that is well-formed and has room. `parents`, `depths`: one for each token."""

    cache: CacheT
    token_ids: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    logit_rows: Sequence[int]


def check_inputs(
    inputs: Sequence[SequenceInput], kind: type[CacheT], num_embeddings: int, context_limit: int
) -> list[CheckedInput[CacheT]]:
    """Check all inputs of a step and make room for them. `kind`: the caches of the runner.

    Raises ValueError for malformed inputs, ContextLengthExceeded, NoCapacity (some caches may have grown, none has
    changed its content) and TypeError for another runner's cache.
    """
    if len({id(item.cache) for item in inputs}) != len(inputs):
        raise ValueError("two inputs share a cache")
    checked = []
    for item in inputs:
        cache, token_ids, logit_rows = item.cache, item.token_ids, item.logit_rows
        if not isinstance(cache, kind):
            raise TypeError("the cache is another runner's")
        parents = item.parents if item.parents is not None else range(ROOT, len(token_ids) - 1)
        if len(parents) != len(token_ids):
            raise ValueError("every token needs a parent")
        depths = depths_of(parents)
        if any(not 0 <= token_id < num_embeddings for token_id in token_ids):
            raise ValueError(f"a token id is outside the model's {num_embeddings} embeddings")
        if any(not 0 <= row < len(token_ids) for row in logit_rows):
            raise ValueError("a logit row is outside the input")
        num_levels = max(depths, default=-1) + 1
        needed = cache.length + num_levels
        if needed > context_limit:
            raise ContextLengthExceeded(f"{needed} tokens exceed the model's context of {context_limit}")
        cache.reserve_step(len(token_ids), num_levels)
        checked.append(CheckedInput(cache, token_ids, parents, depths, logit_rows))
    return checked
