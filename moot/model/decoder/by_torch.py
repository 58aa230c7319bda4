"""A decoder's layers by torch's own operations, where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moot.model.attention import Step
from moot.model.decoder.attend import attend
from moot.model.decoder.layers import Weights, gated, turned_heads
from moot.model.decoder.tiles import StepTiles
from moot.model.determinism import RowRules


def run_layers(
    weights: Weights, embedded: Tensor, positions: Sequence[int], step: Step, rules: RowRules, layers: Sequence[int]
) -> Tensor:
    """embedded: bfloat16 [rows, width]. Returns what the last norm makes of the last layer's rows, of that shape."""
    heads, (rows, width) = weights.heads, embedded.shape
    both = torch.cat((embedded, embedded.neg()), dim=1)
    hidden, negated = both[:, :width], both[:, width:]
    turns = weights.rotary.at(positions)
    tiles = StepTiles(step, rows, heads, rules)
    for index in layers:
        layer = weights.layers[index]
        projected = layer.queries_keys_values.in_tiles(layer.before_attention(both), rules.product_tile)
        turned = turned_heads(projected, turns, heads, layer.head_norm, layer.query_scale)
        values = projected[:, heads.turned * heads.dim :].view(rows, heads.kv_heads, heads.dim)
        tiles.store(index, turned, values)
        mixed = tiles.attend(index, layer.window, attend)
        hidden.add_(layer.attended.in_tiles(mixed, rules.product_tile))
        torch.neg(hidden, out=negated)
        gate_up = layer.gate_up.in_tiles(layer.before_mlp(both), rules.product_tile)
        hidden.add_(layer.down.in_tiles(gated(gate_up), rules.product_tile))
        torch.neg(hidden, out=negated)
        step.progress()
    return weights.last_norm(both)
