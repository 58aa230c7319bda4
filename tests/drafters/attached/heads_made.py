"""Heads with random weights for tiny targets, and what they say by the book: one chain, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from moot.core.noise import gumbel
from moot.core.types import SamplingParams
from moot.drafters.attached.heads import target_rows
from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape, embed
from moot.model.loading.load import LoadedModel

KNOWN_IDS = [*range(40, 130), 258]


def make_head(folder: Path, loaded: LoadedModel, ids: Sequence[int] = KNOWN_IDS, seed: int = 0, **facts: str) -> Path:
    """Far from the identity and from zero, so that every input counts."""
    generator = torch.Generator().manual_seed(seed)
    width = int(loaded.model.get_input_embeddings().weight.shape[1])  # type: ignore[operator, union-attr]
    head = RecurrentHead(RecurrentHeadShape(width, 32, len(ids), 2), torch.tensor(ids))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    head.save(folder, {"tokenizer_fingerprint": loaded.info.tokenizer_fingerprint, **facts})
    return folder


@torch.no_grad()
def by_the_book(
    folder: Path, loaded: LoadedModel, token_ids: Sequence[int], state: torch.Tensor, params: SamplingParams, count: int
) -> tuple[list[int], list[int]]:
    """Ids and confidence bytes of a chain of `count` ids: no filters, no rules, no batch."""
    head, _ = RecurrentHead.load(folder)
    head = head.to(torch.float32)
    ids = head.get_buffer("token_ids")
    embedding, rows = target_rows(loaded, ids)
    text, confidences, states = list(token_ids), [], state.float()[None]
    for _ in range(count):
        states = head.advance(states, embed(embedding, torch.tensor([[text[-1], text[-2]]])))
        logits = head.logits(states, rows)[0]
        scores, total = logits[:-1].double(), logits.logsumexp(0)
        if not params.is_greedy:
            noise = [gumbel(params.seed, len(text), int(id_)) for id_ in ids]
            scores = scores / params.temperature + torch.tensor(noise)
            total = scores.logsumexp(0)
        column = int(scores.argmax())
        share = math.exp(float(scores[column] - total))
        text.append(int(ids[column]))
        confidences.append(round(255 * share))
    return text[len(token_ids) :], confidences
