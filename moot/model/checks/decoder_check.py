"""The check behind a decoder's batch-invariant mode: row counts under which its parts round alike.

It finds how many rows a decoder's products, attention and element-wise parts may have in a call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moot.core.errors import ConfigError
from moot.model.cache.contiguous import SPAN_SLOTS, round_up
from moot.model.checks.rowcases import MOST_OUTPUTS, Case, cancelling, cancelling_attention, first_holding, of_rows
from moot.model.decoder.decoder import Decoder
from moot.model.decoder.layers import HeadShape, gated, turned_heads
from moot.model.decoder.products import Product
from moot.model.decoder.tiles import attend
from moot.model.rows import NATURAL_KERNELS, PRODUCT_SLOTS, TILE_ROWS, Padding, RowRules

_LARGEST_TILES = (256, TILE_ROWS)
_PADDINGS = (Padding(1, 1), Padding(2, 1), Padding(4, 1), Padding(16, 16), Padding(32, 32))


def decoder_rules(decoder: Decoder, context_limit: int) -> RowRules:
    """The cheapest row counts under which rows round alike here; kernels compute each row by itself.

    Raises ConfigError when there are none.
    """
    if decoder.kernels is not None:
        return NATURAL_KERNELS
    generator = torch.Generator().manual_seed(0)
    for tile in _LARGEST_TILES:
        cases = [*_product_cases(decoder, tile, generator), *_row_cases(decoder, tile, generator)]
        linear = first_holding(_PADDINGS, cases)
        if linear is not None:
            break
    else:
        raise ConfigError("batch-invariant mode does not hold: products depend on the number of rows")
    attention = first_holding(_PADDINGS, list(_attention_cases(decoder.weights.heads, context_limit, generator)))
    if attention is None:
        raise ConfigError("batch-invariant mode does not hold: attention depends on the number of rows")
    return RowRules(TILE_ROWS, linear, attention, True, tile, TILE_ROWS, PRODUCT_SLOTS)


def _product_cases(decoder: Decoder, tile: int, generator: torch.Generator) -> Iterator[Case]:
    products = [decoder.head]
    for layer in decoder.weights.layers:
        products += [layer.queries_keys_values, layer.attended, layer.gate_up, layer.down]
    for outputs, inputs, has_bias in sorted({(each.outputs, each.inputs, each.has_bias) for each in products}):
        rows, weight = cancelling((TILE_ROWS,), (min(outputs, MOST_OUTPUTS),), inputs, generator)
        bias = torch.zeros(len(weight), dtype=torch.bfloat16) if has_bias else None
        yield Case(of_rows(Product(weight.bfloat16(), bias), rows.bfloat16()), tile)


def _row_cases(decoder: Decoder, tile: int, generator: torch.Generator) -> Iterator[Case]:
    """Cases of norms, rotation and activation: nothing here can be made to cancel, and rows are few enough to try them
    all."""
    weights = decoder.weights
    heads, layer = weights.heads, weights.layers[0]
    half = torch.randn(TILE_ROWS, weights.last_norm.width, generator=generator).bfloat16()
    yield Case(of_rows(layer.before_mlp, torch.cat((half, -half), dim=1)), tile)
    yield Case(of_rows(gated, torch.randn(TILE_ROWS, layer.gate_up.outputs, generator=generator).bfloat16()), tile)
    projected = torch.randn(TILE_ROWS, layer.queries_keys_values.outputs, generator=generator).bfloat16()
    turns = weights.rotary.at(range(TILE_ROWS))

    @torch.inference_mode()
    def turn(index: Tensor) -> Tensor:
        return turned_heads(projected[index], turns[index], heads, layer.head_norm, layer.query_scale)

    yield Case(turn, tile)


def _attention_cases(heads: HeadShape, context_limit: int, generator: torch.Generator) -> Iterator[Case]:
    """Cases of attention: for every number of slots that is attended to by products, and one of the fused call's if
    there are more."""
    longest = round_up(context_limit, SPAN_SLOTS)
    lengths = [*range(SPAN_SLOTS, min(longest, PRODUCT_SLOTS) + 1, SPAN_SLOTS)]
    for slots in [*lengths, *([PRODUCT_SLOTS + SPAN_SLOTS] if longest > PRODUCT_SLOTS else [])]:
        for cancel_scores in (True, False):
            yield _attention_case(heads, slots, cancel_scores, generator)


def _attention_case(heads: HeadShape, slots: int, cancel_scores: bool, generator: torch.Generator) -> Case:
    group, kv_heads = heads.group, heads.kv_heads
    queries, keys, values = cancelling_attention(kv_heads, group, slots, heads.dim, cancel_scores, generator)
    mask = torch.zeros(TILE_ROWS, slots, dtype=torch.bfloat16)
    if cancel_scores:
        mask[:, slots - 12 :] = float("-inf")

    @torch.inference_mode()
    def compute(index: Tensor) -> Tensor:
        picked = queries[:, index].view(kv_heads, -1, heads.dim)
        shown = mask[index].repeat_interleave(group, 0)
        result = attend(picked, keys, values, shown, group, slots <= PRODUCT_SLOTS)
        return result.view(kv_heads, len(index), group * heads.dim).transpose(0, 1)

    return Case(compute)
