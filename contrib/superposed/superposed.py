"""Several sequences from one pass of a draft model (superposed decoding, arXiv 2405.18400).

The first row is the prefix's own, and its `num_sequences` best ids begin as many sequences. From then on one row
stands for all of them: what is fed is the sum of their last ids' embeddings, weighted by their probabilities. Which of
its continuations belongs to which sequence, a table of n-grams helps to tell (superposed_voices). Of the continuations
of all sequences the most probable survive; proposals are these, best first, then, where more are asked for, sequences
that fell on the way. With one sequence it is the draft model alone.

At temperature > 0 rows are ordered by what the target draws by, logits over temperature plus its noise of that
position, so that the first sequence is coupled as a single draft is and the others come next with the same noise.

Confidence byte: round(255 * p), p the probability of the token after its sequence as it was ordered by: of the
interpolated row, given the noise where there is some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contrib.superposed.superposed_rows import MixedRows, SuperposedDrafting
from moot.core.errors import ConfigError
from moot.core.options import option
from moot.core.types import Proposal
from moot.drafters.interface import Ask, Kind
from moot.drafters.lookup.ngram import NgramTable
from moot.drafters.neural.draft_model import DraftModelDrafter, DraftModelOptions, as_chain
from moot.drafters.neural.neural_sessions import NeuralSession
from moot.shipped import locate

MOST_SEQUENCES = 16

SESSIONS_AT_ONCE = 64
"""Rows of sums that one forward may read."""


@dataclass(frozen=True, kw_only=True)
class SuperposedOptions(DraftModelOptions):
    num_sequences: int = option(3, help="sequences that one row stands for", minimum=1, maximum=MOST_SEQUENCES)
    table: Path | None = option(
        None, help="npz file of n-grams that tell the sequences apart, or its folder; none: the row is everybody's"
    )
    table_weight: float = option(0.7, help="what the table counts against the row, in 0..1", minimum=0, maximum=1)
    table_strength: float = option(0.5, help="occurrences of a context that make the table half sure", above=0)


class SuperposedDrafter(DraftModelDrafter):
    kind = "superposed"

    def __init__(self, options: SuperposedOptions) -> None:
        rows = MixedRows(options.load(), SESSIONS_AT_ONCE)
        super().__init__(options, rows.loaded, rows.num_ids)
        # It reads the text as the same model by itself would: beside that, it is no second opinion.
        self.family = options.family or "neural"
        table = NgramTable.load(locate(options.table)) if options.table else None
        if table is not None and table.tokenizer_fingerprint not in ("", self.tokenizer_fingerprint):
            raise ConfigError(
                f"option table: {options.table} has tokenizer {table.tokenizer_fingerprint}, "
                f"the draft model has {self.tokenizer_fingerprint}"
            )
        self._drafting = SuperposedDrafting(
            self._feed,
            self._sampler,
            rows,
            options.num_sequences,
            table,
            options.table_weight,
            options.table_strength,
            options.min_confidence,
            options.sharpen,
        )

    def propose(self, asks: Sequence[Ask[NeuralSession]]) -> list[list[Proposal]]:
        answers: list[list[Proposal]] = [[] for _ in asks]
        asked = [(index, ask, self._room(ask)) for index, ask in enumerate(asks)]
        able = [entry for entry in asked if entry[2]]
        for _, ask, _ in able:
            self._feed.use(ask.session)
        for first in range(0, len(able), SESSIONS_AT_ONCE):
            part = able[first : first + SESSIONS_AT_ONCE]
            beams = self._drafting.draft([(ask.session, length) for _, ask, length in part])
            for (index, ask, _), beam in zip(part, beams, strict=True):
                answers[index] = [as_chain(path) for path in beam.proposals(ask.width)]
        return answers


KIND = Kind("superposed", SuperposedOptions, SuperposedDrafter)
