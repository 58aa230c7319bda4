"""Loads any transformers causal language model from a local folder or hub id, ready to be driven by the runner.

It also decides where the model runs, and in which number format.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from moot.core.errors import ConfigError, ModelRefused
from moot.core.types import ModelInfo
from moot.model.cache.contiguous import KvShape
from moot.model.decoder.decoder import Decoder
from moot.model.decoder.kernels.library import load_kernels
from moot.model.loading.drivable import prove_drivable
from moot.shipped import cache_dir
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")
"""Instructions with which products in bfloat16 are faster than in float32. Others may have such, too (ARM's `bf16`):
they were not tried, and `--dtype bfloat16` says it for them."""


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device {device} is not auto, cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} was asked for, but torch finds no GPU")
    return torch.device(device)


def choose_dtype(
    dtype: str, device: torch.device, stored: torch.dtype | None = None, features: Mapping[str, object] | None = None
) -> torch.dtype:
    """The number format to load in; auto on a CPU: bfloat16 where it multiplies such numbers, else float32. `stored`:
    what the model's config says its weights are; None: nothing. `features`: of the CPU, as torch names them; None:
    those of this one. Raises ConfigError for an unknown name."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype} is not auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    # By what the CPU can do, never by a measurement: verifiers that start under different load must not compute
    # different texts. A model that stores float64 has a reason to.
    if stored is torch.float64:
        return torch.float64
    features = torch.cpu.get_capabilities() if features is None else features
    return torch.bfloat16 if any(features.get(name) is True for name in BFLOAT16_FEATURES) else torch.float32


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with its tokenizer. `num_embeddings`: ids the model can be fed. `num_logits`: width of a logit
    row (the padded vocabulary).

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
        """Cap of the attention scores, of models that have one."""
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
    native: bool = True,
) -> LoadedModel:
    """Load weights (safetensors only, no remote code) and tokenizer, and prove that the runner can drive the model.

    `lean`: compute with a decoder of our own where one is known and gives the model's numbers, else by its modules.
    `native`: what lies between products by compiled kernels, where CPU and compiler allow it.

    `dtype` auto: see choose_dtype. Raises ModelRefused, naming the model and the reason, for what is not a decoder-only
    model whose attention is a registered function.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    name = str(path_or_id)
    chosen_device = choose_device(device)
    config = _read_config(name, revision)
    chosen_dtype = choose_dtype(dtype, chosen_device, config.get_text_config(decoder=True).dtype)
    model = _load_weights(name, config, chosen_dtype, revision).to(chosen_device).eval()
    tokenizer = load_tokenizer(path_or_id, revision)
    shape = _kv_shape(name, model, chosen_dtype, chosen_device)
    limit = _context_limit(name, model.config)
    kernels = load_kernels(cache_dir()) if native and lean else None
    decoder = prove_drivable(name, model, shape, limit, lean, kernels)
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
    selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    return LoadedModel(model, tokenizer, info, shape, heads, num_embeddings, num_logits, selects_rows, decoder)


def _read_config(name: str, revision: str | None) -> Any:
    try:
        config: Any = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(f"{name}: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        kind = type(config).__name__.removesuffix("Config")
        raise ModelRefused(f"{name}: {kind} is an encoder-decoder model; only decoder-only models can be served")
    return config


def _load_weights(name: str, config: Any, dtype: torch.dtype, revision: str | None) -> Any:
    kind = type(config).__name__.removesuffix("Config")
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
