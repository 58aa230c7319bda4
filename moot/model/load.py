"""Any transformers causal language model from a local folder or hub id, ready to be driven by the runner."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from moot.core.errors import ConfigError, ModelRefused
from moot.core.types import ROOT, ModelInfo
from moot.model.attention import ATTENTION_NAME, STEP_ARGUMENT, AttentionArguments, Step, plan_segment
from moot.model.decoder.build import build_decoder, release
from moot.model.decoder.decoder import Decoder
from moot.model.determinism import NATURAL, NATURAL_DECODER
from moot.model.kv import KvPool, KvShape, SequenceCache
from moot.model.layers import install
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size

_log = logging.getLogger("moot.model")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`num_embeddings`: ids the model can be fed. `num_logits`: width of a logit row (the padded vocabulary).

    `decoder`: what computes the pass when there is one; the modules of `model` then have given it their weights.
    """

    model: nn.Module
    tokenizer: Any
    info: ModelInfo
    kv_shape: KvShape
    num_heads: int
    num_embeddings: int
    num_logits: int
    selects_rows: bool
    decoder: Decoder | None = None

    @property
    def softcap(self) -> float | None:
        """Cap of the attention scores, of models that have one (softcap.py)."""
        config: Any = self.model.config
        return getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)

    def call(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor, extra: dict[str, Any]) -> Tensor:
        """Logits [len(logit_rows), num_logits] of one ragged pass; ids and positions are [1, tokens]."""
        if self.selects_rows:
            # With no row wanted one is computed and dropped: an empty product is not worth a path of its own.
            extra = {**extra, "logits_to_keep": logit_rows if len(logit_rows) else 1}
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
        logits = output.logits[0]
        if not self.selects_rows:
            logits = logits[logit_rows]
        logits = logits[: len(logit_rows)]
        return logits if logits.dtype is torch.float64 else logits.float()


def load_model(
    path_or_id: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    num_threads: int | None = None,
    lean: bool = True,
) -> LoadedModel:
    """Load weights (safetensors only, no remote code) and tokenizer, and prove that the runner can drive the model.

    `lean`: compute with a decoder of our own where one is known and gives the model's numbers, else by its modules.

    `dtype` auto: bfloat16 where a short measurement shows that it is faster than float32. Raises ModelRefused, naming
    the model and the reason, for what is not a decoder-only model whose attention is a registered function.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    name = str(path_or_id)
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    model = _load_weights(name, chosen_dtype, revision).to(chosen_device).eval()
    tokenizer = load_tokenizer(path_or_id, revision)
    shape = _kv_shape(name, model, chosen_dtype, chosen_device)
    limit = _context_limit(name, model.config)
    decoder = _prove_drivable(name, model, shape, limit, lean)
    num_embeddings = int(model.get_input_embeddings().weight.shape[0])
    num_logits = int(getattr(model.get_output_embeddings(), "out_features", num_embeddings))
    heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
    folder = Path(path_or_id)
    info = ModelInfo(
        model=folder.resolve().name if folder.is_dir() else name,
        revision=revision or _revision(folder, model),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocab_size=min(vocabulary_size(tokenizer), num_embeddings, num_logits),
        context_limit=limit,
        end_token_ids=_end_token_ids(model, tokenizer),
    )
    return LoadedModel(model, tokenizer, info, shape, heads, num_embeddings, num_logits, _selects_rows(model), decoder)


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device {device} is not auto, cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} was asked for, but torch finds no GPU")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype} is not auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _linear_seconds(torch.bfloat16) < _linear_seconds(torch.float32) else torch.float32


def _linear_seconds(dtype: torch.dtype) -> float:
    """Best of five of a product as verification has it: 8 rows, a weight larger than the cache of a core."""
    weight, rows = torch.zeros(4096, 1024, dtype=dtype), torch.zeros(8, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        functional.linear(rows, weight)
        best = min(best, time.perf_counter() - start)
    return best


def _load_weights(name: str, dtype: torch.dtype, revision: str | None) -> Any:
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(f"{name}: {error}") from error
    kind = type(config).__name__.removesuffix("Config")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name}: {kind} is an encoder-decoder model; only decoder-only models can be served")
    try:
        return AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelRefused(f"{name}: {kind} cannot be loaded: {error}") from error


def _selects_rows(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.inference_mode()
def _prove_drivable(name: str, model: Any, shape: KvShape, limit: int, lean: bool) -> Decoder | None:
    """Run a few tokens in two chunks and compare with the model's own pass: by a decoder, else by the model's modules
    with our layers and attention. Returns the decoder if it is what will be used."""
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
            decoder = build_decoder(model, shape, seen)
        if decoder is not None:
            ours, _ = _drive(model, decoder, shape, token_ids, ends)
            if not _distance(ours, plain) <= _bound(shape.dtype):
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
    distance = _distance(ours, plain)
    if not distance <= _bound(shape.dtype):
        raise ModelRefused(f"{name}: {kind} cannot be driven: logits differ from its own attention's by {distance:.2g}")
    if decoder is not None:
        release(model)
    return decoder


def _distance(ours: Tensor, plain: Tensor) -> float:
    """Largest relative error of a row."""
    return float(((ours - plain).double().norm(dim=-1) / plain.double().norm(dim=-1).clamp_min(1e-30)).max())


def _bound(dtype: torch.dtype) -> float:
    # Half-precision models of many layers drift by some per cent; a wrong mask or position gives errors near 1.
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


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
        rules = NATURAL if decoder is None else NATURAL_DECODER
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


def _kv_shape(name: str, model: Any, dtype: torch.dtype, device: torch.device) -> KvShape:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int):
        raise ModelRefused(f"{name}: {type(model).__name__} has no attention heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KvShape(layers, kv_heads, head_dim, dtype, device)


def _context_limit(name: str, config: Any) -> int:
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelRefused(f"{name}: its config states no context limit (max_position_embeddings)")
    # "longrope" turns all positions of a pass otherwise as soon as one of them lies beyond the original context: then
    # a text would depend on its batch-mates. Up to there every pass uses the same frequencies.
    return min([limit, *_original_contexts(getattr(config.get_text_config(decoder=True), "rope_parameters", None))])


def _original_contexts(rope: Any) -> list[int]:
    """Original contexts of the "longrope" parameters in a config, which may be one for all layers or one per kind."""
    if not isinstance(rope, dict):
        return []
    if "rope_type" not in rope:
        return [context for one in rope.values() for context in _original_contexts(one)]
    return [int(rope["original_max_position_embeddings"])] if rope["rope_type"] == "longrope" else []


def _end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source in (tokenizer.eos_token_id, model.config.eos_token_id, getattr(generation, "eos_token_id", None)):
        ids.update([source] if isinstance(source, int) else source or ())
    return frozenset(ids)


def _revision(folder: Path, model: Any) -> str:
    """The hub's commit, or for a local folder a digest of its config and of each weight file's header, size and end."""
    if not folder.is_dir():
        return str(getattr(model.config, "_commit_hash", None) or "unknown")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(8)
            digest.update(header + file.read(min(int.from_bytes(header, "little"), size)))
            file.seek(max(0, size - 65536))
            digest.update(file.read())
        digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()[:16]
