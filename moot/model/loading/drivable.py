"""The proof, once per load, that we compute what the model's own forward pass computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moot.core.errors import ModelRefused
from moot.core.types import ROOT
from moot.model.cache.contiguous import KvPool, KvShape, SequenceCache
from moot.model.decoder.build import build_decoder, release
from moot.model.decoder.decoder import Decoder
from moot.model.decoder.kernels.library import Kernels
from moot.model.layout import STEP_ARGUMENT, AttentionArguments, Step, plan_segment
from moot.model.modules.attention import ATTENTION_NAME
from moot.model.modules.tiled_layers import install
from moot.model.rows import NATURAL

_log = logging.getLogger("moot.model")


@torch.inference_mode()
def prove_drivable(
    name: str, model: Any, shape: KvShape, limit: int, lean: bool, kernels: Kernels | None = None
) -> Decoder | None:
    """Run a few tokens in two chunks and compare with the model's own pass: by a decoder (with `kernels` if it suits
    them), else by the model's modules with our layers and attention. Returns the decoder if it is what will be used."""
    kind, device = type(model).__name__, shape.device
    count = min(24, limit)
    vocab = int(model.get_input_embeddings().weight.shape[0])
    token_ids = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = (count - 5, count) if count > 5 else (count,)
    decoder = None
    try:
        plain = model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.arange(count, device=device)[None],
            use_cache=False,
        ).logits[0]
        model.set_attn_implementation(ATTENTION_NAME)
        _, seen = _drive(model, None, shape, token_ids, ends)
        if lean and len(seen) == shape.num_layers:
            decoder = build_decoder(model, shape, seen, kernels)
        if decoder is not None:
            ours, _ = _drive(model, decoder, shape, token_ids, ends)
            if not distance(ours, plain) <= most_distance(shape.dtype):
                _log.warning("%s: %s is computed by its own modules, which is slower", name, kind)
                decoder = None
        if decoder is None:
            install(model)
            ours, seen = _drive(model, None, shape, token_ids, ends)
    except (ModelRefused, TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise ModelRefused(f"{name}: {kind} cannot be driven: {error}") from error
    if set(seen) != set(range(shape.num_layers)):
        raise ModelRefused(
            f"{name}: {kind} has {shape.num_layers} layers, of which {len(seen)} use the registered attention;"
            " state-space layers and attention of a model's own cannot be driven"
        )
    apart = distance(ours, plain)
    if not apart <= most_distance(shape.dtype):
        raise ModelRefused(f"{name}: {kind} cannot be driven: logits differ from its own attention's by {apart:.2g}")
    if decoder is not None:
        release(model)
    return decoder


def distance(ours: Tensor, plain: Tensor) -> float:
    """Largest relative error of a row."""
    return float(((ours - plain).double().norm(dim=-1) / plain.double().norm(dim=-1).clamp_min(1e-30)).max())


def most_distance(dtype: torch.dtype) -> float:
    # Half-precision models of many layers drift by some per cent (transformers' own pass of SmolLM2 by 0.11 from the
    # kernels', where the CPU lacks AVX512-BF16); a wrong mask or position gives errors near 1.
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.2


def _drive(
    model: Any, decoder: Decoder | None, shape: KvShape, token_ids: list[int], ends: Sequence[int]
) -> tuple[Tensor, dict[int, AttentionArguments]]:
    """Logits [tokens, vocab] of a pass in chunks that end at `ends`, and the layers whose attention was ours."""
    cache = SequenceCache(KvPool(shape, ends[-1]))
    logits: list[Tensor] = []
    seen: dict[int, AttentionArguments] = {}
    for end in ends:
        first, size = cache.length, end - cache.length
        cache.reserve(end)
        rules = NATURAL if decoder is None else decoder.natural_rules
        step = Step([plan_segment(cache, 0, range(ROOT, size - 1), range(size), rules)], lambda: None)
        if decoder is not None:
            logits.append(decoder.forward(token_ids[first:end], range(first, end), range(size), step, rules))
        else:
            output = model(
                input_ids=torch.tensor([token_ids[first:end]], device=shape.device),
                position_ids=torch.arange(first, end, device=shape.device)[None],
                use_cache=False,
                **{STEP_ARGUMENT: step},
            )
            logits.append(output.logits[0])
        cache.commit(range(size))
        seen |= step.layers_seen
    return torch.cat(logits), seen
