"""Attention whose scores are capped before the softmax, as Gemma 2 has it: torch's fused attention has no such step.

Source: Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024, section 2: scores become
cap * tanh(scores / cap).
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """query [heads, rows, dim], key and value [kv_heads, slots, dim], additive mask [rows, slots].

    Returns [heads, rows, dim] in the query's dtype; half precision is computed in float32.
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
