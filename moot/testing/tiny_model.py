"""Tiny random models with a byte-level tokenizer, written as ordinary model folders: for tests and trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from moot.testing.byte_tokenizer import bytes_as_tokens

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257, 258; the last one ends a turn and is the end token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma", "gemma2", "gemma3_text", "opt", "phi3")


def make_tiny_model(
    path: str | Path,
    family: str = "llama",
    vocab_size: int = 300,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    hidden: int = 64,
    context: int = 2048,
    sharpness: float = 4.0,
    **config: Any,
) -> Path:
    """Write a model folder with random weights and return its path. The same arguments give the same bytes.

    `vocab_size` >= 259 rows of embeddings; the tokenizer knows 256 bytes and three special tokens, so ids from 259 on
    are padding. `sharpness` scales the last layer's weights: more makes greedy text less of a lottery between near
    ties. `config`: further fields of the family's config (num_key_value_heads, sliding_window, ...).
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}")
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError("vocab_size must be at least 259")
    path = Path(path)
    end_id = 256 + SPECIAL_TOKENS.index("<|im_end|>")
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "bos_token_id": 256,
        "eos_token_id": end_id,
        "pad_token_id": 256,
        "tie_word_embeddings": False,
        # Attention weights far from uniform, so that a wrong mask or position cannot hide.
        "initializer_range": 0.2,
    }
    if family not in ("gpt_neox", "opt"):
        fields["num_key_value_heads"] = 2
    if family == "mistral":
        fields["sliding_window"] = None
    if family == "qwen3" or family.startswith("gemma"):
        fields["head_dim"] = hidden // 4
    if family in ("gemma2", "gemma3_text"):
        fields |= {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        fields["layer_types"] += ["full_attention"] * (layers % 2)
    if family == "opt":
        fields |= {"ffn_dim": hidden * 2, "word_embed_proj_dim": hidden, "init_std": 0.2}
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        made = transformers.AutoConfig.for_model(family, **(fields | config))
        model: Any = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    finally:
        torch.random.set_rng_state(generator_state)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    model.to(dtype).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One id per byte (ids 0 to 255 are the byte values) and the special tokens."""
    return bytes_as_tokens(
        list(SPECIAL_TOKENS),
        # As real ones do: what the library remembers is up to 10,000 words, not whole texts.
        split_words=True,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
