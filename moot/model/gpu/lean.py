"""The forward pass of Llama-like models in few operations, with the weights of the loaded transformers module.

Nothing in `forward` waits for the device or depends on values, so that a graph can record it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moot.core.errors import ModelRefused
from moot.model.gpu.paged_attention import PagedAttention
from moot.model.gpu.plan import DevicePlan
from moot.model.loading.llama_weights import LayerWeights, LinearWeights, NormWeights, read_weights, why_unknown
from moot.model.loading.load import LoadedModel

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class LeanModel:
    """The lean pass over a loaded model's weights. Raises ModelRefused for a model whose weights are not known, or have
    been packed for another pass."""

    def __init__(self, loaded: LoadedModel, use_kernel: bool, linear: Linear = functional.linear) -> None:
        name, shape = loaded.info.model, loaded.kv_shape
        if loaded.decoder is not None:
            raise ModelRefused(f"{name}: its weights have been packed for the CPU; load it with lean=False")
        if reason := why_unknown(loaded.model, shape):
            raise ModelRefused(f"{name}: {reason}")
        read = read_weights(loaded.model)
        self._heads, self._kv_heads, self._dim = loaded.num_heads, shape.num_kv_heads, shape.head_dim
        self._frequencies: Tensor = read.rotary.inv_freq.to(shape.device, torch.float32)
        self._rotation_scale = float(read.rotary.attention_scaling)
        self._embeddings, self._last_norm, self._head = read.embedding, read.last_norm, read.head
        self._layers = read.layers
        self._attention = PagedAttention(use_kernel, read.layers[0].scaling)
        self._linear = linear

    @property
    def weights(self) -> list[Tensor]:
        """Every matrix that a pass multiplies by, each once."""
        layers = [(one.queries_keys_values, one.attended, one.gate_up, one.down) for one in self._layers]
        return [product.weight for product in (*(each for layer in layers for each in layer), self._head)]

    def forward(
        self, plan: DevicePlan, kv: Sequence[Tensor], layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [plan.sizes.logit_rows, vocab], float32 (float64 of float64), and what the output layer was given for
        them, [plan.sizes.logit_rows, width]; writes keys and values into `kv`. `layers`: through these alone."""
        hidden = functional.embedding(plan.token_ids, self._embeddings)
        angles = plan.positions[:, None].to(torch.float32) * self._frequencies  # [rows, dim / 2]
        cosines = (torch.cat((angles.cos(),) * 2, -1) * self._rotation_scale).to(hidden.dtype)[:, None]
        sines = (torch.cat((-angles.sin(), angles.sin()), -1) * self._rotation_scale).to(hidden.dtype)[:, None]
        for index in range(len(self._layers)) if layers is None else layers:
            layer = self._layers[index]
            normed = _normed(layer.before_attention, hidden)
            hidden = hidden + self._attend(layer, normed, cosines, sines, plan, kv[index])
            gate, up = self._product(layer.gate_up, _normed(layer.before_mlp, hidden)).chunk(2, -1)
            hidden = hidden + self._product(layer.down, functional.silu(gate) * up)
        if not plan.sizes.logit_rows:
            empty = hidden.new_empty(0, self._head.weight.shape[0])
            return empty if empty.dtype is torch.float64 else empty.float(), hidden[:0]
        wanted = _normed(self._last_norm, hidden.index_select(0, plan.logit_rows))
        logits = self._product(self._head, wanted)
        return logits if logits.dtype is torch.float64 else logits.float(), wanted

    def _attend(
        self, layer: LayerWeights, x: Tensor, cosines: Tensor, sines: Tensor, plan: DevicePlan, kv: Tensor
    ) -> Tensor:
        rows, heads, kv_heads = x.shape[0], self._heads, self._kv_heads
        qkv = self._product(layer.queries_keys_values, x).view(rows, heads + 2 * kv_heads, self._dim)
        turned, values = qkv.split([heads + kv_heads, kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turned.split([heads, kv_heads], 1)
            turned = torch.cat((_normed(layer.query_norm, query), _normed(layer.key_norm, key)), 1)
        # x * cos + (-x2, x1) * sin, with the sign in the sines: the halves only change places.
        turned = turned * cosines + turned.roll(self._dim // 2, -1) * sines
        query, key = turned.split([heads, kv_heads], 1)
        kv.index_copy_(1, plan.slots, torch.stack((key, values)))
        if plan.sizes.copies:
            kv.index_copy_(1, plan.copy_to, kv.index_select(1, plan.copy_from))
        attended = self._attention(query.contiguous(), kv, plan, layer.window)
        return self._product(layer.attended, attended.reshape(rows, heads * self._dim))

    def _product(self, by: LinearWeights, x: Tensor) -> Tensor:
        return self._linear(x, by.weight, by.bias)


def _normed(by: NormWeights, x: Tensor) -> Tensor:
    return functional.rms_norm(x, by.scale.shape, by.scale, by.epsilon)


def tiled_linear(tile: int) -> Linear:
    """A linear layer in products of exactly `tile` rows each; the number of rows must be a multiple of it, or is padded
    to one."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        count = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -count % tile))
        parts = [functional.linear(part, weight, bias) for part in padded.split(tile)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]

    return linear
