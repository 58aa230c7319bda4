"""A decoder from a transformers model whose layers are known; None for any other, which its own modules compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moot.model.cache.contiguous import KvShape
from moot.model.decoder.by_kernels import kernels_suit
from moot.model.decoder.decoder import Decoder
from moot.model.decoder.kernels.library import Kernels
from moot.model.decoder.kernels.products import KernelProduct
from moot.model.decoder.layers import HeadNorm, HeadShape, Layer, Norm, Rotary, Weights, pairing
from moot.model.decoder.products import Product, can_pack
from moot.model.layout import AttentionArguments

KINDS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models of these classes have the layers that `Layer` describes. What a config can change is looked at one by one."""

_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions that turn a position by the same angles whatever else is in the pass."""

Pack = Callable[..., Product]

_SILU = ("SiLU", "SiLUActivation")


def build_decoder(
    model: Any, shape: KvShape, arguments: Mapping[int, AttentionArguments], kernels: Kernels | None = None
) -> Decoder | None:
    """`arguments`: what each layer's attention was called with. The model keeps its weights: see `release`."""
    if type(model).__name__ not in KINDS or not can_pack(shape.dtype, shape.device):
        return None
    config, inner = model.config, model.model
    heads = HeadShape(int(config.num_attention_heads), shape.num_kv_heads, shape.head_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _FIXED_ROTATIONS or shape.head_dim % 2:
        return None
    rotary = Rotary(inner.rotary_emb)
    if rotary.width != shape.head_dim // 2:
        return None
    if any(type(_activation(layer.mlp)).__name__ not in _SILU for layer in inner.layers):
        return None
    if kernels is not None and not kernels_suit(heads, int(config.hidden_size), int(config.intermediate_size)):
        kernels = None
    pack = Product if kernels is None else partial(KernelProduct, kernels)
    with torch.inference_mode():
        weights = Weights(
            inner.embed_tokens.weight.detach(),
            tuple(_layer(layer, heads, arguments[index], pack) for index, layer in enumerate(inner.layers)),
            _norm(inner.norm),
            pack(model.lm_head.weight, model.lm_head.bias, **({} if kernels is None else {"single": True})),
            rotary,
            heads,
        )
    return Decoder(weights, kernels)


def release(model: nn.Module) -> None:
    """Let go of the weights that a decoder has packed: the model keeps their shapes, and cannot compute any more."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))


def _activation(mlp: Any) -> Any:
    return mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _layer(layer: Any, heads: HeadShape, arguments: AttentionArguments, pack: Pack) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    weight, bias = _joined(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
    scaling = heads.dim**-0.5 if arguments.scaling is None else arguments.scaling
    order = pairing(heads.dim)
    rows = torch.arange(weight.shape[0])
    rows[: heads.turned * heads.dim] = (torch.arange(heads.turned)[:, None] * heads.dim + order).flatten()
    weight, bias = weight[rows], None if bias is None else bias[rows]
    head_norm, query_scale = None, scaling
    if hasattr(attention, "q_norm"):
        scales = (attention.q_norm.weight.float()[order] * scaling, attention.k_norm.weight.float()[order])
        scale = torch.cat((scales[0].expand(heads.query_heads, -1), scales[1].expand(heads.kv_heads, -1)))
        head_norm, query_scale = HeadNorm(scale.detach(), float(attention.q_norm.variance_epsilon)), 1.0
    elif math.frexp(scaling)[0] == 0.5:
        # A power of two scales a weight without rounding it.
        weight[: heads.query_heads * heads.dim] *= scaling
        if bias is not None:
            bias[: heads.query_heads * heads.dim] *= scaling
        query_scale = 1.0
    gating = {} if pack is Product else {"gated": True}
    return Layer(
        before_attention=_norm(layer.input_layernorm),
        queries_keys_values=pack(weight, bias),
        head_norm=head_norm,
        query_scale=query_scale,
        attended=pack(attention.o_proj.weight, attention.o_proj.bias),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=pack(*_joined(mlp, ("gate_up_proj",), ("gate_proj", "up_proj")), **gating),
        down=pack(mlp.down_proj.weight, mlp.down_proj.bias),
        window=arguments.window,
    )


def _joined(parent: Any, whole: tuple[str, ...], parts: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product: as the model has it, or of several projections of the same input."""
    layers = [getattr(parent, name) for name in (whole if hasattr(parent, whole[0]) else parts)]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    none = [weight.new_zeros(layer.out_features) for layer in layers]
    biases = [zeros if layer.bias is None else layer.bias.detach() for layer, zeros in zip(layers, none, strict=True)]
    return weight, torch.cat(biases)
