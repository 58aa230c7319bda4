"""Deterministic mode with attention of several requests in one call: every call that may be made is tried at start."""

from __future__ import annotations

import torch
from torch import Tensor

from moot.model.arena import MOST_SLAB_SLOTS, Chunk, slabs_per_chunk
from moot.model.decoder.attend import attend, attend_together
from moot.model.decoder.layers import HeadShape
from moot.model.decoder.together import ROWS, SIZES
from moot.model.determinism import TILE_ROWS
from moot.model.kv import SPAN_SLOTS, KvShape, round_up
from moot.model.rowcases import cancelling_attention

_HIDDEN = 12
"""Slots that no row sees. What is left is no power of two, so that weights of equal scores are not short numbers, whose
sums would hardly round."""


def together_holds(heads: HeadShape, context_limit: int, generator: torch.Generator) -> bool:
    """Whether each request comes out of each call, whatever its place, as out of a call of its own, bit by bit."""
    longest = min(round_up(context_limit, SPAN_SLOTS), MOST_SLAB_SLOTS)
    return all(_holds(heads, slots, generator) for slots in range(SPAN_SLOTS, longest + 1, SPAN_SLOTS))


@torch.inference_mode()
def _holds(heads: HeadShape, slots: int, generator: torch.Generator) -> bool:
    slabs, kv_heads, group, dim = slabs_per_chunk(slots), heads.kv_heads, heads.group, heads.dim
    queries, keys, values = _cancelling_both(slabs, heads, slots, generator)
    # In a chunk, because a product may look at how its operands lie in memory.
    chunk = Chunk(KvShape(1, kv_heads, dim, torch.bfloat16, torch.device("cpu")), slots)
    attended = chunk.data[0].flatten(1, 2)
    attended[0], attended[1] = keys, values
    mask = torch.zeros(slabs, 1, TILE_ROWS * group, slots, dtype=torch.bfloat16)
    mask[..., slots - _HIDDEN :] = float("-inf")
    alone = [
        attend(own.flatten(1, 2), key, value, mask[0, 0], group, True)
        for own, key, value in zip(*(x.split(kv_heads) for x in (queries, *attended)), strict=True)
    ]
    expected = torch.cat(alone).view(slabs, kv_heads, TILE_ROWS, group, dim)
    queries = queries.view(slabs, kv_heads, TILE_ROWS, group, dim)
    for size in [size for size in SIZES if size <= slabs]:
        for number, rows in enumerate(ROWS):
            # Slabs are whole pages of memory, so where in a chunk a call starts shifts nothing: both ends in turns.
            first = (slabs - size) * (number % 2)
            keys, values = attended[:, first * kv_heads : (first + size) * kv_heads]
            own = queries[first : first + size, :, :rows]
            flat = own.reshape(size * kv_heads, rows * group, dim)
            result = attend_together(flat, keys, values, mask[:size, :, : rows * group])
            if not torch.equal(result.view(own.shape), expected[first : first + size, :, :rows]):
                return False
    return True


def _cancelling_both(
    slabs: int, heads: HeadShape, slots: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of which half, drawn, have scores that are nothing but rounding, scaled up, and the others equal scores
    over values that cancel: one call tries both products, at each place. The last slots are to be hidden.

    Queries [slabs * kv_heads, TILE_ROWS, group, dim], keys and values [slabs * kv_heads, slots, dim]. bfloat16.
    """
    count, shown = slabs * heads.kv_heads, slots - _HIDDEN
    queries, keys, _ = cancelling_attention(count, heads.group, slots, heads.dim, True, generator)
    *_, values = cancelling_attention(count, 1, shown, heads.dim, False, generator)
    queries *= torch.randint(2, queries.shape[:3], generator=generator)[..., None]
    hidden = torch.randn(count, _HIDDEN, heads.dim, generator=generator).bfloat16()
    return queries, keys, torch.cat((values, hidden), 1)
