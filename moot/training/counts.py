"""Makes an n-gram table (moot.proposers.ngram_table) from what the target wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moot.proposers.ngram import NgramOptions, NgramProposer
from moot.proposers.ngram_table import TABLE, NgramTable
from moot.training.asked import measure_kind
from moot.training.dataset import Text
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
        return measure_kind(proposer, self.text)
