"""Draft models of tests: tiny ones that compute the same bits in any batch, and one whose numbers are poisoned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from moot.core.types import SamplingParams
from moot.drafters.interface import Ask
from moot.drafters.neural.neural import NeuralDrafter
from moot.drafters.registry import create

VOCAB = 259
"""Of the tokenizer; the models have 300 rows, those from 259 on are padding."""

CONTEXT = 96
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
COUPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=77, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.4, seed=5, ignore_eos=True)


def exact(folder: Path, **options: object) -> dict[str, object]:
    """Options of a kind with a draft model."""
    fixed = {"model": folder, "dtype": "float64", "device": "cpu", "batch_invariant": True, "num_threads": 1}
    return fixed | options


def neural(folder: Path, **options: object) -> NeuralDrafter:
    drafter = create("neural", exact(folder, **options))
    assert isinstance(drafter, NeuralDrafter)
    return drafter


def chain_ids(drafter: NeuralDrafter, session: Any, num_tokens: int) -> tuple[int, ...]:
    """Ids of the one proposal, none where it abstains."""
    chains = drafter.propose([Ask(session, num_tokens)])[0]
    return chains[0].token_ids if chains else ()


def poisoned(folder: Path, copy: Path, *token_ids: int) -> Path:
    """A copy of the model in which the embeddings of these ids are no numbers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[list(token_ids)] = float("nan")
    model.save_pretrained(copy)
    for path in folder.glob("tokenizer*"):
        (copy / path.name).write_bytes(path.read_bytes())
    return copy
