"""The report that all replays share: counts per text, acceptance lengths with intervals over texts, and their facts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.harness.pages import PageConfig
from lab.replay.evaluate import Policies, Replay
from lab.replay.folder import Recording
from moot.config import option

SAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class RecordingConfig(PageConfig):
    recording: Path = option(help="folder of a recording")
    drafters: tuple[str, ...] = option((), help="ids of those that vote (none: all that were recorded)")


def over_texts(num_texts: int, value: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """95 % interval of a value of some texts: of as many, drawn with replacement, each time the same ones."""
    draw = random.Random(0)
    found = sorted(value(draw.choices(range(num_texts), k=num_texts)) for _ in range(SAMPLES))
    return found[round(0.025 * SAMPLES)], found[round(0.975 * SAMPLES) - 1]


@dataclass(frozen=True, slots=True)
class Counts:
    """Per text, in the order of the recording: rounds, accepted and drafted tokens."""

    rounds: Sequence[int]
    accepted: Sequence[int]
    drafted: Sequence[int] | None = None

    @property
    def length(self) -> float:
        return self.of(range(len(self.rounds)))

    def of(self, texts: Sequence[int]) -> float:
        """Acceptance length over some of the texts, which may be named more than once."""
        return 1 + sum(self.accepted[i] for i in texts) / max(sum(self.rounds[i] for i in texts), 1)

    def interval(self) -> tuple[float, float]:
        return over_texts(len(self.rounds), self.of)

    def beside(self, whole: Counts) -> str:
        """The acceptance length, and by how much it differs from that of `whole`."""
        if self == whole:
            return f"{self.length:.3f}"
        low, high = over_texts(len(self.rounds), lambda texts: self.of(texts) - whole.of(texts))
        return f"{self.length:.3f} ({low:+.3f} to {high:+.3f})"


def counts_of(replay: Replay, policies: Policies) -> Counts:
    generations = [one.generation for one in replay.run(policies)]
    return Counts(
        [one.num_rounds for one in generations],
        [one.num_accepted_tokens for one in generations],
        [one.num_draft_tokens for one in generations],
    )


def bound_of(replay: Replay, policies: Policies, coherent: bool) -> Counts:
    found = replay.bound(policies, coherent=coherent)
    return Counts([rounds for _, rounds, _ in found], [accepted for _, _, accepted in found])


def shapes_of(base: Policies, budgets: Sequence[int]) -> dict[str, Policies]:
    """The chain, and a tree of each budget of draft tokens."""
    trees = {f"tree of {budget}": replace(base, shape="tree", max_draft_tokens=budget) for budget in budgets}
    return {"chain": replace(base, shape="chain")} | trees


def facts_of(recording: Recording) -> dict[str, Any]:
    """What a recording is of."""
    return {
        "model": recording.meta.model,
        "origin": recording.meta.origin,
        "texts": len(recording.texts),
        "tokens": sum(len(text.output_token_ids) for text in recording.texts),
        "drafters": {
            id_: {name: Path(value).name for name, value in record.facts.options.items()}
            for id_, record in recording.records.items()
        },
    }
