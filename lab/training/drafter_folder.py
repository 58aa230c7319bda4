"""From training text to a drafter's folder: train, measure, write, describe.

Makes an n-gram table (moot.drafters.lookup.ngram) from what the target wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lab.training.card import write_card
from lab.training.dataset import TextStore, TrainingText
from lab.training.fit import forget
from lab.training.head_training import HeadRecipe, HeadTrainer
from lab.training.measure import measure_kind
from lab.training.neural_training import NeuralRecipe, NeuralTrainer
from lab.training.teacher import Teacher
from moot.drafters.lookup.ngram import TABLE, NgramDrafter, NgramOptions, NgramTable
from moot.model.loading.prepare import SMOLLM2


@dataclass(frozen=True, slots=True)
class CountRecipe:
    """`order`: longest context; `successors` kept of each."""

    order: int = 3
    successors: int = 2


class CountTrainer:
    title = "N-gram table"
    what = "Counts of what follows up to three tokens, for the drafter kind `ngram` (option `table`: this folder)."

    def __init__(self, teacher: Teacher, text: TrainingText, recipe: CountRecipe) -> None:
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
        drafter = NgramDrafter(NgramOptions(vocab_size=self.teacher.info.vocab_size, table=self._file))
        return measure_kind(drafter, self.text)


SIZES = ("small", "medium", "large")
LICENSES = {SMOLLM2: "Apache-2.0"}
"""Of targets whose license is known here."""

_HEADS = {"small": 512, "medium": 1024, "large": 2048}
_NEURAL = {"small": (128, 1), "medium": (192, 2), "large": (256, 3)}
_COUNTS = {"small": (2, 1), "medium": (3, 2), "large": (3, 4)}


class Trainer(Protocol):
    title: str
    what: str

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the result, for the model card and the check of a checkpoint."""

    def train(self, folder: Path, facts: Mapping[str, Any], until: float = ...) -> bool:
        """Returns whether it is complete; if not, calling it again goes on."""

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None: ...

    def measure(self) -> dict[str, float]:
        """As `acceptance.report` gives it; called after `save`."""


def trainer(kind: str, size: str, seed: int, passes: float | None, teacher: Teacher, text: TrainingText) -> Trainer:
    """`passes`: over the text; None: the kind's own number."""
    given = {"seed": seed} | ({} if passes is None else {"passes": passes})
    match kind:
        case "heads":
            return HeadTrainer(teacher, text, HeadRecipe(width=_HEADS[size], **given))  # type: ignore[arg-type]
        case "neural":
            width, layers = _NEURAL[size]
            return NeuralTrainer(teacher, text, NeuralRecipe(width=width, layers=layers, **given))  # type: ignore[arg-type]
        case "ngram":
            return CountTrainer(teacher, text, CountRecipe(*_COUNTS[size]))
    raise ValueError(f"no trainer makes {kind}")


def make_drafter(
    trainer: Trainer,
    store: TextStore,
    folder: Path,
    command: str,
    until: float = float("inf"),
    say: Callable[[str], None] = print,
) -> bool:
    """Write the drafter to `folder` with its model card. Returns False where the time was over before."""
    facts = {**trainer.facts, "text": text_facts(store), "threads": torch.get_num_threads()}
    if not trainer.train(folder, facts, until):
        return False
    trainer.save(folder, facts)
    acceptance = trainer.measure()
    describe(folder, trainer.title, trainer.what, facts, acceptance, command, store, say)
    forget(folder)
    return True


def text_facts(store: TextStore) -> dict[str, Any]:
    """What decides a training text."""
    return {name: store.manifest[name] for name in ("target", "revision", "prompts", "settings")}


def describe(
    folder: Path,
    title: str,
    what: str,
    facts: Mapping[str, Any],
    acceptance: Mapping[str, float],
    command: str,
    store: TextStore,
    say: Callable[[str], None] = print,
) -> None:
    """Write the card of a drafter made from `store`, and say how good it is."""
    target = store.manifest["target"]
    write_card(folder, f"{title} for {target}", what, facts, acceptance, command, LICENSES.get(target, ""))
    say(
        f"held out, greedy: first token right {acceptance['agreement_1']:.1%}, mean acceptance length"
        f" {acceptance['length_4']:.3f} (K = 4), {acceptance['length_8']:.3f} (K = 8)"
    )
