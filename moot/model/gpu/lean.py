"""The forward pass of Llama-like models in few operations, with the weights of the loaded transformers module.

Llama, Mistral, Qwen2, Qwen3 and Phi-3 are one architecture: root-mean-square norms before attention and before a gated
MLP, rotary positions, grouped query heads; they differ in biases, in norms of queries and keys, and in which weights
they store as one. Nothing in `forward` waits for the device or depends on values, so that a graph can record it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moot.core.errors import ModelRefused
from moot.model.gpu.attention import PagedAttention
from moot.model.gpu.plan import DevicePlan
from moot.model.loading.load import LoadedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not change with the length of the text."""

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; products with equal input are joined."""

    attention_norm: Norm
    mlp_norm: Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Norm | None
    key_norm: Norm | None
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


class LeanModel:
    """Raises ModelRefused for a model that is not of these families, or not built as they are."""

    def __init__(self, loaded: LoadedModel, use_kernel: bool, linear: Linear = functional.linear) -> None:
        model: Any = loaded.model
        config = model.config
        name = loaded.info.model
        if loaded.decoder is not None:
            raise ModelRefused(f"{name}: its weights have been packed for the CPU; load it with lean=False")
        if config.model_type not in FAMILIES:
            raise ModelRefused(f"{name}: {config.model_type} has no forward pass of its own for accelerators")
        base, shape = model.model, loaded.kv_shape
        rotary = base.rotary_emb
        if getattr(rotary, "rope_type", None) not in FIXED_ROTATIONS:
            raise ModelRefused(f"{name}: rotary positions change with the length of the text")
        if rotary.inv_freq.numel() * 2 != shape.head_dim:
            raise ModelRefused(f"{name}: rotary positions turn a part of each head only")
        if config.hidden_act not in ("silu", "swish"):
            raise ModelRefused(f"{name}: activation {config.hidden_act}")
        self._heads, self._kv_heads, self._dim = loaded.num_heads, shape.num_kv_heads, shape.head_dim
        self._frequencies: Tensor = rotary.inv_freq.to(shape.device, torch.float32)
        self._rotation_scale = float(rotary.attention_scaling)
        self._embeddings: Tensor = model.get_input_embeddings().weight
        self._final_norm = _norm(base.norm)
        head = model.get_output_embeddings()
        self._head, self._head_bias = head.weight, head.bias
        self._layers = [_layer(module, config, index) for index, module in enumerate(base.layers)]
        self._attention = PagedAttention(use_kernel, float(base.layers[0].self_attn.scaling))
        self._linear = linear

    @property
    def weights(self) -> list[Tensor]:
        """Every matrix that a pass multiplies by, each once."""
        layers = [(one.qkv, one.output, one.gate_up, one.down) for one in self._layers]
        return [*(weight for layer in layers for weight in layer), self._head]

    @property
    def layers(self) -> Sequence[Layer]:
        return self._layers

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
            hidden = hidden + self._attend(layer, layer.attention_norm(hidden), cosines, sines, plan, kv[index])
            gated = self._linear(layer.mlp_norm(hidden), layer.gate_up, layer.gate_up_bias)
            gate, up = gated.chunk(2, -1)
            hidden = hidden + self._linear(functional.silu(gate) * up, layer.down, layer.down_bias)
        if not plan.sizes.logit_rows:
            empty = hidden.new_empty(0, self._head.shape[0])
            return empty if empty.dtype is torch.float64 else empty.float(), hidden[:0]
        wanted = self._final_norm(hidden.index_select(0, plan.logit_rows))
        logits = self._linear(wanted, self._head, self._head_bias)
        return logits if logits.dtype is torch.float64 else logits.float(), wanted

    def _attend(self, layer: Layer, x: Tensor, cosines: Tensor, sines: Tensor, plan: DevicePlan, kv: Tensor) -> Tensor:
        rows, heads, kv_heads = x.shape[0], self._heads, self._kv_heads
        qkv = self._linear(x, layer.qkv, layer.qkv_bias).view(rows, heads + 2 * kv_heads, self._dim)
        turned, values = qkv.split([heads + kv_heads, kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turned.split([heads, kv_heads], 1)
            turned = torch.cat((layer.query_norm(query), layer.key_norm(key)), 1)
        # x * cos + (-x2, x1) * sin, with the sign in the sines: the halves only change places.
        turned = turned * cosines + turned.roll(self._dim // 2, -1) * sines
        query, key = turned.split([heads, kv_heads], 1)
        kv.index_copy_(1, plan.slots, torch.stack((key, values)))
        if plan.sizes.copies:
            kv.index_copy_(1, plan.copy_to, kv.index_select(1, plan.copy_from))
        attended = self._attention(query.contiguous(), kv, plan, layer.window)
        return self._linear(attended.reshape(rows, heads * self._dim), layer.output, layer.output_bias)


def tiled_linear(tile: int) -> Linear:
    """Products of exactly `tile` rows each; the number of rows must be a multiple of it, or is padded to one."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        count = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -count % tile))
        parts = [functional.linear(part, weight, bias) for part in padded.split(tile)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]

    return linear


def _layer(module: Any, config: Any, index: int) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    if hasattr(attention, "qkv_proj"):
        qkv, qkv_bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    else:
        qkv, qkv_bias = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
    if hasattr(mlp, "gate_up_proj"):
        gate_up, gate_up_bias = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias
    else:
        gate_up, gate_up_bias = _joined([mlp.gate_proj, mlp.up_proj])
    query_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
    key_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
    return Layer(
        _norm(module.input_layernorm),
        _norm(module.post_attention_layernorm),
        qkv,
        qkv_bias,
        query_norm,
        key_norm,
        attention.o_proj.weight,
        attention.o_proj.bias,
        gate_up,
        gate_up_bias,
        mlp.down_proj.weight,
        mlp.down_proj.bias,
        _window(attention, config, index),
    )


def _window(attention: Any, config: Any, index: int) -> int | None:
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif config.model_type in ("mistral", "phi3"):
        window = getattr(config, "sliding_window", None)
    else:
        window = None
    return None if window is None else int(window)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _joined(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of layers with the same input as one; without a copy where they already lie side by side."""
    biases = [module.bias for module in modules]
    bias = None if biases[0] is None else _side_by_side([one.detach() for one in biases])
    return _side_by_side([module.weight.detach() for module in modules]), bias


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    end = parts[0].storage_offset()
    first = parts[0]
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.numel()
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())
