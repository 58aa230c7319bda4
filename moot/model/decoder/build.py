"""A decoder from a transformers model whose layers are known; None for any other, which its own modules compute."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from moot.model.cache.contiguous import KvShape
from moot.model.decoder.by_kernels import kernels_suit
from moot.model.decoder.decoder import Decoder
from moot.model.decoder.kernels.kernel_products import KernelProduct
from moot.model.decoder.kernels.library import Kernels
from moot.model.decoder.layers import DecoderWeights, HeadNorm, HeadShape, Layer, Norm, Rotary, pairing
from moot.model.decoder.products import Product, can_pack
from moot.model.layout import AttentionArguments
from moot.model.loading.llama_weights import LayerWeights, NormWeights, read_weights, why_unknown

_log = logging.getLogger("moot.model")

Pack = Callable[..., Product]


def build_decoder(
    model: Any, shape: KvShape, arguments: Mapping[int, AttentionArguments], kernels: Kernels | None = None
) -> Decoder | None:
    """The decoder of a model, None where its layers are not known. `arguments`: what each layer's attention was called
    with. The model keeps its weights: see `release`."""
    config = model.config
    if shape.dtype is not torch.bfloat16 or shape.device.type != "cpu":
        return None
    if reason := why_unknown(model, shape):
        _log.info("computed by its own modules: %s", reason)
        return None
    heads = HeadShape(int(config.num_attention_heads), shape.num_kv_heads, shape.head_dim)
    if kernels is not None and not kernels_suit(heads, int(config.hidden_size), int(config.intermediate_size)):
        kernels = None
    if kernels is None and not can_pack(shape.dtype, shape.device):
        return None
    pack = Product if kernels is None else partial(KernelProduct, kernels)
    with torch.inference_mode():
        read = read_weights(model)
        if any(not _called_as_read(layer, arguments[index]) for index, layer in enumerate(read.layers)):
            _log.info("computed by its own modules: attention is not called as its weights were read")
            return None
        weights = DecoderWeights(
            read.embedding,
            tuple(_layer(layer, heads, pack) for layer in read.layers),
            _norm(read.last_norm),
            pack(read.head.weight, read.head.bias, **({} if kernels is None else {"single": True})),
            Rotary(read.rotary),
            heads,
        )
    return Decoder(weights, kernels)


def release(model: nn.Module) -> None:
    """Let go of the weights that a decoder has packed: the model keeps their shapes, and cannot compute any more."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))


def _called_as_read(layer: LayerWeights, called: AttentionArguments) -> bool:
    return called.window == layer.window and called.scaling in (None, layer.scaling)


def _norm(read: NormWeights) -> Norm:
    return Norm(read.scale, read.epsilon)


def _layer(read: LayerWeights, heads: HeadShape, pack: Pack) -> Layer:
    projected, scaling = read.queries_keys_values, read.scaling
    order = pairing(heads.dim)
    rows = torch.arange(projected.weight.shape[0])
    rows[: heads.turned * heads.dim] = (torch.arange(heads.turned)[:, None] * heads.dim + order).flatten()
    weight, bias = projected.weight[rows], None if projected.bias is None else projected.bias[rows]
    head_norm, query_scale = None, scaling
    if read.query_norm is not None and read.key_norm is not None:
        scales = (read.query_norm.scale.float()[order] * scaling, read.key_norm.scale.float()[order])
        scale = torch.cat((scales[0].expand(heads.query_heads, -1), scales[1].expand(heads.kv_heads, -1)))
        head_norm, query_scale = HeadNorm(scale, read.query_norm.epsilon), 1.0
    elif math.frexp(scaling)[0] == 0.5:
        # A power of two scales a weight without rounding it.
        weight[: heads.query_heads * heads.dim] *= scaling
        if bias is not None:
            bias[: heads.query_heads * heads.dim] *= scaling
        query_scale = 1.0
    gating = {} if pack is Product else {"gated": True}
    return Layer(
        before_attention=_norm(read.before_attention),
        queries_keys_values=pack(weight, bias),
        head_norm=head_norm,
        query_scale=query_scale,
        attended=pack(read.attended.weight, read.attended.bias),
        before_mlp=_norm(read.before_mlp),
        gate_up=pack(read.gate_up.weight, read.gate_up.bias, **gating),
        down=pack(read.down.weight, read.down.bias),
        window=read.window,
    )
