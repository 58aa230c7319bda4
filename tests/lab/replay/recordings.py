"""Recordings of made-up texts by the real drafters: what the tests of the replay share."""

from __future__ import annotations

import random
from pathlib import Path

from lab.replay.folder import Meta, Recording, open_recording, write_meta
from lab.replay.recorded_texts import TargetText, save_texts
from lab.replay.recorder import Asking, record_drafter
from moot.core.types import FinishReason
from moot.drafters.interface import parse_entries

VOCAB = 40
CONTEXT = 4096
DRAFTERS = ("suffix", "prompt_lookup", "recycling", "ngram", "short=prompt_lookup:max_ngram=1")


def quiet(text: str) -> None:
    """Progress of nobody's interest."""


def made_up_texts(count: int = 6, seed: int = 0, length: int = 60) -> list[TargetText]:
    """Texts that repeat themselves now and then, as answers do; every second one ends by itself."""
    draw = random.Random(seed)
    texts = []
    for number in range(count):
        phrases = [[draw.randrange(VOCAB) for _ in range(draw.randint(3, 9))] for _ in range(4)]
        ids: list[int] = []
        while len(ids) < length + 30:
            ids += draw.choice(phrases)
            if draw.random() < 0.3:
                ids.append(draw.randrange(VOCAB))
        output = tuple(ids[30 : 30 + length])
        rows = tuple((id_, *draw.sample(range(VOCAB), 3)) for id_ in output)
        ends = number % 2 == 0
        texts.append(
            TargetText(
                f"{number}7",
                "qa" if number % 3 else "coding",
                tuple(ids[:30]),
                output,
                rows,
                FinishReason.STOP if ends else FinishReason.LENGTH,
                length + 10 if ends else length,
            )
        )
    return texts


def make_recording(
    folder: Path,
    texts: list[TargetText],
    drafters: tuple[str, ...] = DRAFTERS,
    num_tokens: int = 8,
    width: int = 1,
) -> Recording:
    write_meta(folder, Meta("made-up", "none", VOCAB, CONTEXT, "tests", {}))
    save_texts(folder / "texts.npz", texts)
    for entry in parse_entries(drafters, "--drafters"):
        record_drafter(folder, entry, texts, VOCAB, Asking(num_tokens, width), quiet)
    return open_recording(folder)
