"""The weights of Llama-like models as transformers' modules hold them, read for the passes that compute by themselves.

Llama, Mistral, Phi-3, Qwen2 and Qwen3 are one architecture: root-mean-square norms before attention and before a gated
MLP, rotary positions, grouped query heads; they differ in biases, in norms of queries and keys, and in which weights
they store as one. What a config can change is looked at one by one. Each pass lays the weights out as it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moot.model.cache.contiguous import KvShape
from moot.model.sampling.logits import joined

_KINDS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)

_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions that turn a position by the same angles whatever else is in the pass."""

_ACTIVATIONS = ("silu", "swish")
"""Two names of one function."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Weights of one product: weight [outputs, inputs], bias [outputs]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of a root-mean-square norm: scale [width]."""

    scale: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Products with the same input are one. The gate's outputs come before those that it
    multiplies."""

    before_attention: NormWeights
    queries_keys_values: LinearWeights
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    scaling: float
    window: int | None
    attended: LinearWeights
    before_mlp: NormWeights
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights of a whole model. embedding: [vocab, width], the output layer's weight, too, where they are tied.
    `rotary`: the model's module that gives a position's cosines and sines."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    last_norm: NormWeights
    head: LinearWeights
    rotary: Any


def why_unknown(model: Any, shape: KvShape) -> str | None:
    """Why `read_weights` does not know this transformers model; None where it does."""
    if type(model).__name__ not in _KINDS:
        return f"{model.config.model_type} has no forward pass of its own"
    rotary = model.model.rotary_emb
    if getattr(rotary, "rope_type", None) not in _FIXED_ROTATIONS:
        return "rotary positions change with the length of the text"
    if rotary.inv_freq.numel() * 2 != shape.head_dim:
        return "rotary positions turn a part of each head only"
    if model.config.hidden_act not in _ACTIVATIONS:
        return f"activation {model.config.hidden_act}"
    return None


def read_weights(model: Any) -> ModelWeights:
    """The weights of a model that `why_unknown` does not refuse. Nothing is copied but what must lie side by side and
    does not."""
    inner = model.model
    return ModelWeights(
        inner.embed_tokens.weight.detach(),
        tuple(_layer(module, model.config) for module in inner.layers),
        _norm(inner.norm),
        _joined([model.lm_head]),
        inner.rotary_emb,
    )


def _layer(module: Any, config: Any) -> LayerWeights:
    attention, mlp = module.self_attn, module.mlp
    has_norms = hasattr(attention, "q_norm")
    return LayerWeights(
        before_attention=_norm(module.input_layernorm),
        queries_keys_values=_whole_or_parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        query_norm=_norm(attention.q_norm) if has_norms else None,
        key_norm=_norm(attention.k_norm) if has_norms else None,
        scaling=float(attention.scaling),
        window=_window(attention, config),
        attended=_joined([attention.o_proj]),
        before_mlp=_norm(module.post_attention_layernorm),
        gate_up=_whole_or_parts(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        down=_joined([mlp.down_proj]),
    )


def _window(attention: Any, config: Any) -> int | None:
    """The sliding window of a layer. Some families decide it layer by layer, others take what their config says."""
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        window = config.sliding_window if config.model_type in ("mistral", "phi3") else None
    return None if window is None else int(window)


def _norm(module: Any) -> NormWeights:
    return NormWeights(module.weight.detach(), float(module.variance_epsilon))


def _whole_or_parts(parent: Any, whole: str, parts: Sequence[str]) -> LinearWeights:
    return _joined([getattr(parent, name) for name in ([whole] if hasattr(parent, whole) else parts)])


def _joined(modules: Sequence[Any]) -> LinearWeights:
    """Layers with the same input as one product. Biases are zeros for those that have none, unless none has one."""
    weight = joined([module.weight.detach() for module in modules])
    if all(module.bias is None for module in modules):
        return LinearWeights(weight, None)
    none = [weight.new_zeros(module.out_features) for module in modules]
    given = [zeros if one.bias is None else one.bias.detach() for one, zeros in zip(modules, none, strict=True)]
    return LinearWeights(weight, joined(given))
