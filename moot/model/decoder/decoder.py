"""The forward pass of a decoder: embedding, layers, output.

The layers are computed by compiled kernels, or, where there are none, by torch's own operations (`run_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moot.model.decoder.by_kernels import KernelLayers
from moot.model.decoder.kernels.library import Kernels
from moot.model.decoder.layers import DecoderWeights, gated, turned_heads
from moot.model.decoder.tiles import StepTiles
from moot.model.layout import Step
from moot.model.rows import NATURAL_DECODER, NATURAL_KERNELS, RowRules


def run_layers(
    weights: DecoderWeights,
    embedded: Tensor,
    positions: Sequence[int],
    step: Step,
    rules: RowRules,
    layers: Sequence[int],
) -> Tensor:
    """Compute all layers by torch. embedded: bfloat16 [rows, width]. Returns what the last norm makes of the last
    layer's rows, of that shape."""
    heads, (rows, width) = weights.heads, embedded.shape
    both = torch.cat((embedded, embedded.neg()), dim=1)
    hidden, negated = both[:, :width], both[:, width:]
    turns = weights.rotary.at(positions)
    tiles = StepTiles(step, rows, heads, rules.product_slots)
    for index in layers:
        layer = weights.layers[index]
        projected = layer.queries_keys_values.in_tiles(layer.before_attention(both), rules.product_tile)
        turned = turned_heads(projected, turns, heads, layer.head_norm, layer.query_scale)
        values = projected[:, heads.turned * heads.dim :].view(rows, heads.kv_heads, heads.dim)
        tiles.store(index, turned, values)
        mixed = tiles.attend(index, layer.window)
        hidden.add_(layer.attended.in_tiles(mixed, rules.product_tile))
        torch.neg(hidden, out=negated)
        gate_up = layer.gate_up.in_tiles(layer.before_mlp(both), rules.product_tile)
        hidden.add_(layer.down.in_tiles(gated(gate_up), rules.product_tile))
        torch.neg(hidden, out=negated)
        step.progress()
    return weights.last_norm(both)


class Decoder:
    """Weights in a layout of their own, and the pass over them. Not thread-safe: it keeps what positions it has seen.

    A pass computes what the model's own modules do, with fewer roundings: norms and rotations stay in float32 until
    they are stored. `kernels`: these compute the layers, and the weights lie in their products; None: torch computes.
    """

    def __init__(self, weights: DecoderWeights, kernels: Kernels | None = None) -> None:
        self.weights = weights
        self.kernels = kernels
        self._by_kernels = None if kernels is None else KernelLayers(kernels, weights)
        self.head = weights.head
        self.states = weights.embedding.new_empty(0, weights.embedding.shape[1])
        """What the output layer was given for the logit rows of the last pass, [rows, width]."""

    @property
    def way(self) -> str:
        """Which code computes the pass, for the fingerprint of its numbers."""
        return "decoder, " + ("packed weights" if self.kernels is None else f"kernels {self.kernels.variant}")

    @property
    def natural_rules(self) -> RowRules:
        return NATURAL_DECODER if self.kernels is None else NATURAL_KERNELS

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        logit_rows: Sequence[int],
        step: Step,
        rules: RowRules,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits [len(logit_rows), vocab], float32, of a step whose tokens are already padded by `rules`.

        Leaves the tokens' keys and values pending in their caches. `layers`: of these layers alone, ascending.
        """
        weights = self.weights
        chosen = range(len(weights.layers)) if layers is None else layers
        embedded = functional.embedding(torch.tensor(token_ids), weights.embedding)
        if self._by_kernels is None:
            normed = run_layers(weights, embedded, positions, step, rules, chosen)
        else:
            normed = self._by_kernels.run(embedded.float(), positions, step, chosen)
        return self._logits(normed, logit_rows, rules)

    def _logits(self, normed: Tensor, logit_rows: Sequence[int], rules: RowRules) -> Tensor:
        count, head = len(logit_rows), self.head
        if not count:
            self.states = self.states[:0]
            return torch.empty(0, head.outputs)
        padded = [*logit_rows, *[logit_rows[-1]] * (rules.step_rows(count) - count)]
        states = normed if padded == list(range(len(normed))) else normed[torch.tensor(padded)]
        self.states = states[:count]
        return head.in_tiles(states, rules.product_tile)[:count].float()
