"""The forward pass of a decoder, layer by layer: norm, product, turn, attend, product, norm, gated products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moot.model.attention import Step
from moot.model.decoder.attend import attend
from moot.model.decoder.layers import HeadShape, Layer, Norm, gated, turned_heads
from moot.model.decoder.products import Product
from moot.model.decoder.rotary import Rotary
from moot.model.decoder.tiles import StepTiles
from moot.model.determinism import RowRules


class Decoder:
    """Weights in a layout of their own, and the pass over them. Not thread-safe: it keeps what positions it has seen.

    A pass computes what the model's own modules do, with fewer roundings: norms and rotations stay in float32 until
    they are stored.
    """

    def __init__(
        self,
        embedding: Tensor,
        layers: Sequence[Layer],
        last_norm: Norm,
        head: Product,
        rotary: Rotary,
        heads: HeadShape,
    ) -> None:
        self.layers = tuple(layers)
        self.last_norm = last_norm
        self.head = head
        self.rotary = rotary
        self.heads = heads
        self.embedding = embedding
        self.states = embedding.new_empty(0, embedding.shape[1])
        """What the output layer was given for the logit rows of the last pass, [rows, width]."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a pass of one row streams."""
        products = [
            product
            for layer in self.layers
            for product in (layer.queries_keys_values, layer.attended, layer.gate_up, layer.down)
        ]
        return sum(product.num_bytes for product in (*products, self.head))

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
        heads, rows = self.heads, len(token_ids)
        embedded = functional.embedding(torch.tensor(token_ids), self.embedding)
        width = embedded.shape[1]
        both = torch.cat((embedded, embedded.neg()), dim=1)
        hidden, negated = both[:, :width], both[:, width:]
        turns = self.rotary.at(positions)
        tiles = StepTiles(step, rows, heads, rules)
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            projected = _in_tiles(layer.queries_keys_values, layer.before_attention(both), rules)
            turned = turned_heads(projected, turns, heads, layer.head_norm, layer.query_scale)
            values = projected[:, heads.turned * heads.dim :].view(rows, heads.kv_heads, heads.dim)
            tiles.store(index, turned, values)
            mixed = tiles.attend(index, layer.window, attend)
            hidden.add_(_in_tiles(layer.attended, mixed, rules))
            torch.neg(hidden, out=negated)
            gate_up = _in_tiles(layer.gate_up, layer.before_mlp(both), rules)
            hidden.add_(_in_tiles(layer.down, gated(gate_up), rules))
            torch.neg(hidden, out=negated)
            step.progress()
        return self._logits(both, logit_rows, rules)

    def _logits(self, both: Tensor, logit_rows: Sequence[int], rules: RowRules) -> Tensor:
        count = len(logit_rows)
        if not count:
            self.states = self.states[:0]
            return torch.empty(0, self.head.outputs)
        padded = [*logit_rows, *[logit_rows[-1]] * (rules.step_rows(count) - count)]
        if padded != list(range(both.shape[0])):
            both = both[torch.tensor(padded)]
        states = self.last_norm(both)
        self.states = states[:count]
        return _in_tiles(self.head, states, rules)[:count].float()


def _in_tiles(product: Product, x: Tensor, rules: RowRules) -> Tensor:
    if x.shape[0] <= rules.product_tile:
        return product(x)
    return torch.cat([product(part) for part in x.split(rules.product_tile)])
