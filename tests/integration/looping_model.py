"""A target whose greedy text is known in advance: a tiny llama that follows cycles of token ids.

Its layers add nothing to the residual stream, so the next token depends on the last one alone: the output row of a
token points along the embedding of its predecessor. Drafters that copy hit every time, which places ends, stops and
characters of several bytes inside accepted drafts on purpose. At temperature 1 about one token in ten leaves a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from moot.testing.tiny_model import make_tiny_model

END_ID = 258

LAUGHING = tuple(b" ha")
LETTERS = tuple("é😀жx".encode())
ENDING = (*b"12345", END_ID)
"""Five digits and an end token; with ignore_eos they begin again."""

CYCLES = (LAUGHING, LETTERS, ENDING)


def successor_of(cycles: Sequence[Sequence[int]]) -> dict[int, int]:
    return {token: cycle[(index + 1) % len(cycle)] for cycle in cycles for index, token in enumerate(cycle)}


def make_looping_model(path: Path, cycles: Sequence[Sequence[int]] = CYCLES, context: int = 2048) -> Path:
    """No token may be in two cycles. One that is in none is followed by some token of a cycle."""
    make_tiny_model(path, layers=1, context=context)
    model = AutoModelForCausalLM.from_pretrained(path)
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # The padding token's row is zero.
        embedding.div_(embedding.norm(dim=1, keepdim=True).clamp_min(1e-6))
        output.zero_()
        for token, successor in successor_of(cycles).items():
            output[successor] = embedding[token]
    model.save_pretrained(path)
    return path


def greedy_ids(prompt: Sequence[int], count: int, cycles: Sequence[Sequence[int]] = CYCLES) -> list[int]:
    """The next `count` ids of the greedy text, an end notwithstanding; the last id of `prompt` is in a cycle."""
    follows = successor_of(cycles)
    ids = [prompt[-1]]
    for _ in range(count):
        ids.append(follows[ids[-1]])
    return ids[1:]


def make_alike(model: Path, path: Path, noise: float = 0.01) -> Path:
    """A draft model that mostly agrees with `model`: its weights with some noise, drawn from a fixed seed."""
    draft = AutoModelForCausalLM.from_pretrained(model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=draw))
    draft.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((model / name).read_bytes())
    return path
