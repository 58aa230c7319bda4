"""Makes an n-gram table (moot.proposers.ngram_table) from what the target wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moot.core.types import SamplingParams
from moot.proposers.base import Ask
from moot.proposers.ngram import NgramOptions, NgramProposer
from moot.proposers.ngram_table import TABLE, NgramTable
from moot.training.acceptance import LONGEST, Stream, report
from moot.training.dataset import Text
from moot.training.heads import MOST_MEASURED
from moot.training.script import ANSWERS
from moot.training.teacher import Teacher


@dataclass(frozen=True, slots=True)
class CountRecipe:
    """`order`: longest context; `successors` kept of each."""

    order: int = 3
    successors: int = 2


class CountTrainer:
    title = "N-gram table"
    what = "Counts of what follows up to three tokens, for the drafter kind `ngram` (option `table`: this folder)."

    def __init__(self, teacher: Teacher, text: Text, recipe: CountRecipe) -> None:
        self.teacher, self.text, self.recipe = teacher, text, recipe
        self._file: Path | None = None

    @property
    def facts(self) -> dict[str, Any]:
        return {"recipe": asdict(self.recipe), "positions": self.text.num_positions}

    def train(self, folder: Path, facts: Mapping[str, Any], until: float = float("inf")) -> bool:
        return True

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / TABLE
        NgramTable.build(
            self.text.written(),
            self.recipe.order,
            self.recipe.successors,
            self.teacher.info.tokenizer_fingerprint,
        ).save(self._file)

    def measure(self) -> dict[str, float]:
        """Acceptance on held-out rows, by the drafter kind itself, with the table that was saved."""
        proposer = NgramProposer(NgramOptions(vocab_size=self.teacher.info.vocab_size, table=self._file))
        streams: list[Stream] = []
        measured = 0
        for context, roles, _ in self.text.contexts():
            ids: list[int] = context.tolist()
            right = np.zeros(len(ids), np.int64)
            session = proposer.open((), SamplingParams())
            for position, token in enumerate(ids):
                proposer.extend(session, [token])
                if position + 1 < len(ids) and roles[position + 1] in ANSWERS:
                    (chains,) = proposer.propose([Ask(session, LONGEST)])
                    right[position] = _num_right(chains[0].token_ids, ids[position + 1 :]) if chains else 0
            streams.append(Stream(roles, right))
            measured += int(np.isin(roles, ANSWERS).sum())
            if measured >= MOST_MEASURED:
                break
        return report(streams)


def _num_right(chain: tuple[int, ...], following: list[int]) -> int:
    count = 0
    for guess, token in zip(chain, following, strict=False):
        if guess != token:
            break
        count += 1
    return count
