"""A decoder's layers by compiled kernels: four products and four kernels each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moot.model.attention import Step
from moot.model.decoder.layers import Weights
from moot.model.determinism import RowRules
from moot.model.native.kernels import MOST_DIM, Kernels
from moot.model.native.plan import StepPlan


def suits(weights: Weights) -> bool:
    """Whether the kernels take heads and widths of this size."""
    dim = weights.heads.dim
    widths = (weights.last_norm.width, weights.layers[0].down.inputs)
    return dim % 32 == 0 and dim <= MOST_DIM and all(width % 16 == 0 for width in widths)


def run_layers(
    kernels: Kernels,
    weights: Weights,
    hidden: Tensor,
    positions: Sequence[int],
    step: Step,
    rules: RowRules,
    layers: Sequence[int],
) -> Tensor:
    """hidden: bfloat16 [rows, width], written to. Returns what the last norm makes of the last layer's rows."""
    tile, rows = rules.product_tile, len(positions)
    turns = torch.view_as_real(weights.rotary.at(positions)).reshape(rows, -1)
    plan = StepPlan(step, rows, turns, weights.heads)
    chosen = [weights.layers[index] for index in layers]
    following = [*(layer.before_attention for layer in chosen[1:]), weights.last_norm]
    normed = torch.empty_like(hidden)
    active = hidden.new_empty(rows, weights.layers[0].down.inputs)
    first = chosen[0].before_attention if chosen else weights.last_norm
    kernels.norm(hidden, None, first.scale, first.epsilon, normed)
    for index, layer, after in zip(layers, chosen, following, strict=False):
        projected = layer.queries_keys_values.in_tiles(normed, tile)
        head_norm = layer.head_norm
        scale, epsilon = (None, 0.0) if head_norm is None else (head_norm.scale, head_norm.epsilon)
        mixed = kernels.attend(plan, index, projected, scale, epsilon, layer.query_scale, layer.window)
        before = layer.before_mlp
        kernels.norm(hidden, layer.attended.in_tiles(mixed, tile), before.scale, before.epsilon, normed)
        kernels.gate(layer.gate_up.in_tiles(normed, tile), active)
        kernels.norm(hidden, layer.down.in_tiles(active, tile), after.scale, after.epsilon, normed)
        step.progress()
    return normed
