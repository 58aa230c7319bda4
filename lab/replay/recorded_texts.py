"""Recorded texts of the target: what it was asked, what it answered, and its likeliest ids at every place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.replay.files import load_arrays, save_arrays
from lab.replay.replay_prompts import Prompt
from moot.core.errors import ConfigError
from moot.core.types import FinishReason, SamplingParams

_FORMAT = 1
_FINISHES = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class TargetText:
    """One answer. `top_candidates`: per output token the target's likeliest ids there, or empty.

    `max_tokens`, `temperature`, `seed`: what it was asked with; other sampling parameters are at their defaults.
    """

    name: str
    category: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    top_candidates: tuple[tuple[int, ...], ...]
    finish_reason: FinishReason
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def group(self) -> str:
        return Prompt(self.name, self.category, "").group

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)

    @property
    def num_places(self) -> int:
        """Places after which drafters are asked: after 1, 2, ... output tokens, as the first comes with the opening."""
        return max(len(self.output_token_ids) - 1, 0)


def save_texts(path: Path, texts: Sequence[TargetText]) -> None:
    """Replaces the file in one go. Ids take four bytes each, before compression."""
    num_candidates = max((len(row) for text in texts for row in text.top_candidates), default=0)
    tokens = sum(len(text.output_token_ids) for text in texts)
    # Rows may be shorter than others, and unknown: -1 fills them.
    candidates = np.full((tokens, num_candidates), -1, np.int32)
    at = 0
    for text in texts:
        for row in text.top_candidates:
            candidates[at, : len(row)] = row
            at += 1
        at += len(text.output_token_ids) - len(text.top_candidates)
    save_arrays(
        path,
        format=np.array([_FORMAT]),
        names=np.array([text.name for text in texts], np.str_),
        categories=np.array([text.category for text in texts], np.str_),
        prompt_lengths=np.array([len(text.prompt_token_ids) for text in texts], np.int32),
        output_lengths=np.array([len(text.output_token_ids) for text in texts], np.int32),
        prompt_token_ids=np.array([id_ for text in texts for id_ in text.prompt_token_ids], np.uint32),
        output_token_ids=np.array([id_ for text in texts for id_ in text.output_token_ids], np.uint32),
        top_candidates=candidates,
        finishes=np.array([_FINISHES.index(text.finish_reason) for text in texts], np.uint8),
        max_tokens=np.array([text.max_tokens for text in texts], np.int32),
        temperatures=np.array([text.temperature for text in texts], np.float64),
        seeds=np.array([text.seed for text in texts], np.uint64),
    )


def load_texts(path: Path) -> list[TargetText]:
    """Raises ConfigError where `path` is not a file of save_texts."""
    arrays = load_arrays(path, "recorded texts")
    if arrays["format"].tolist() != [_FORMAT]:
        raise ConfigError(f"recorded texts {path} have another format: record them again")
    texts: list[TargetText] = []
    prompt_at = output_at = 0
    for index, name in enumerate(arrays["names"].tolist()):
        prompt_end = prompt_at + int(arrays["prompt_lengths"][index])
        output_end = output_at + int(arrays["output_lengths"][index])
        rows = arrays["top_candidates"][output_at:output_end].tolist()
        texts.append(
            TargetText(
                name,
                str(arrays["categories"][index]),
                tuple(arrays["prompt_token_ids"][prompt_at:prompt_end].tolist()),
                tuple(arrays["output_token_ids"][output_at:output_end].tolist()),
                tuple(tuple(id_ for id_ in row if id_ >= 0) for row in rows),
                _FINISHES[int(arrays["finishes"][index])],
                int(arrays["max_tokens"][index]),
                float(arrays["temperatures"][index]),
                int(arrays["seeds"][index]),
            )
        )
        prompt_at, output_at = prompt_end, output_end
    return texts
