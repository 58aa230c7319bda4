"""Attention of a ragged step: all requests' tokens lie in one row of tokens, each attends to its own request's cache.

transformers' model classes call a registered function with the keyword arguments of the model's call, so the step's
layout travels as `moot_step`. A token attends to its request's committed slots and to its own ancestors, nothing else.

A tree is computed as the chains it consists of: for each root-to-leaf path the tail is copied into the slots after the
committed ones, and the rows that no earlier path had are computed against it. So each row sees exactly the slots, in
the same order, that it would see in a chain, and rounds the same way.

Attention whose scores are capped before the softmax, as Gemma 2 has it, is computed here in plain operations: torch's
fused attention has no such step. Source: Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024,
section 2: scores become cap * tanh(scores / cap).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from moot.core.errors import ModelRefused
from moot.model.layout import STEP_ARGUMENT, AttentionArguments, Segment, Step

ATTENTION_NAME = "moot_ragged"
"""Registered with transformers below: a module that imports the name has the function, too."""


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """query [heads, rows, dim], key and value [kv_heads, slots, dim], additive mask [rows, slots].

    Returns attention with capped scores, [heads, rows, dim] in the query's dtype; half precision is computed in
    float32.
    """
    heads, rows, dim = query.shape
    kv_heads = key.shape[0]
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16):
        query, key, value, mask = query.float(), key.float(), value.float(), mask.float()
    grouped = query.reshape(kv_heads, heads // kv_heads * rows, dim)
    scores = torch.bmm(grouped, key.transpose(1, 2)).mul_(scaling / softcap).tanh_().mul_(softcap)
    weights = scores.view(heads, rows, -1).add_(mask).softmax(dim=-1)
    result = torch.bmm(weights.view(kv_heads, -1, key.shape[1]), value)
    return result.view(heads, rows, dim).to(dtype)


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. query [1, heads, tokens, dim], key and value [1, kv_heads,
    tokens, dim], rotated.

    Returns [1, tokens, heads, dim]. Writes the tokens' keys and values into their caches' pending slots.
    """
    step: Step | None = kwargs.get(STEP_ARGUMENT)
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelRefused(f"attention with {name} is not supported")
    if step is None or attention_mask is not None:
        raise ModelRefused("the model does not pass the step's layout on to its attention function")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every module with an AttentionInterface has its index
    arguments = AttentionArguments(scaling, sliding_window, kwargs.get("softcap"))
    step.layers_seen[layer] = arguments
    queries = query[0].transpose(0, 1)  # [tokens, heads, dim]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    # Rows that only pad belong to nobody and get zeros.
    output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for segment in step.segments:
        own = slice(segment.start, segment.start + segment.count)
        cache = segment.cache
        slots = cache.data[layer]  # [2, slots, kv_heads, dim]
        tree_kv = _store(segment, slots, keys[own], values[own], layer)
        placed: Tensor | None = None
        for tile in segment.tiles:
            if tree_kv is not None and tile.path is not None and tile.path is not placed:
                slots[:, cache.length : cache.length + len(tile.path)] = tree_kv.index_select(1, tile.path)
                placed = tile.path
            attended = slots[:, : tile.kv_length].transpose(1, 2)  # [2, kv_heads, kv_length, dim]
            mask = tile.mask(sliding_window, query)
            result = attend(queries[tile.rows].transpose(0, 1), attended[0], attended[1], mask, arguments)
            output[tile.own_rows] = result[:, : tile.num_rows].transpose(0, 1)
            step.progress()
    return output[None], None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention of one tile. query [heads, rows, dim], key and value [kv_heads, slots, dim], additive mask [rows,
    slots]. Returns what the query's shape is. `arguments`: its window is in the mask already."""
    if arguments.softcap is not None:
        scaling = query.shape[-1] ** -0.5 if arguments.scaling is None else arguments.scaling
        return softcapped_attention(query, key, value, mask, scaling, arguments.softcap)
    grouped = query.shape[0] != key.shape[0]
    return scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=arguments.scaling, enable_gqa=grouped
    )[0]


def _store(segment: Segment, slots: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor | None:
    """Write the segment's keys and values [tokens, kv_heads, dim] to where its pending tokens lie."""
    if segment.tree_kv is None:
        first = segment.cache.length
        slots[0, first : first + segment.count] = keys
        slots[1, first : first + segment.count] = values
        return None
    tree_kv = segment.tree_kv[layer]
    tree_kv[0] = keys
    tree_kv[1] = values
    return tree_kv


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: the step's layout says which tokens a token attends to; transformers need not build one."""


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
