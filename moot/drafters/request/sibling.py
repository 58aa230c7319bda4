"""The drafter `sibling`: what the other choices of the same prompt say (n > 1), since the same target wrote them.

The last ids of a choice's output (and of the prompt before it) are looked for in the others, the longest match first;
of its occurrences, the most frequent continuation is proposed, id by id. At temperature 0, where all choices are equal,
a choice that is behind copies from one that is ahead.

Confidence byte: 16 * level + floor(15 * share), as the suffix kind's: level by the match's length, share the part of
the occurrences left that went on so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moot.core.options import option_of
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Candidates, DrafterOptions, ModelFreeDrafter, PrefixSession, RequestContext, require
from moot.drafters.lookup.suffix import SuffixOptions, confidence_byte
from moot.drafters.request.prediction import PredictionOptions
from moot.drafters.request.siblings import SEPARATOR, Siblings


@dataclass(frozen=True, kw_only=True)
class SiblingOptions(DrafterOptions):
    max_match: int = option_of(
        PredictionOptions, "max_match", help="most last tokens of a choice that are searched for in the other choices"
    )
    min_match: int = option_of(SuffixOptions, "min_match")

    def check_together(self) -> None:
        require(self.min_match <= self.max_match, "min_match", "must not be above max_match")


@dataclass(slots=True)
class SiblingSession(PrefixSession):
    siblings: Siblings | None = None
    choice: int = 0
    first: int = 0
    """Position of the first token that is written into the row: the last ones of the prompt stand before the output."""


class SiblingDrafter(ModelFreeDrafter[SiblingSession]):
    kind = "sibling"
    new_session = SiblingSession
    shares_sessions = True

    def __init__(self, options: SiblingOptions) -> None:
        super().__init__(options)
        self._max_match = options.max_match
        self._min_match = options.min_match

    def serves(self, request_context: RequestContext) -> bool:
        return request_context.siblings is not None

    def open_request(
        self, prefix: Sequence[int], params: SamplingParams, request_context: RequestContext
    ) -> SiblingSession:
        first = max(request_context.prompt_length - self._max_match, 0)
        session = SiblingSession(0, request_context.siblings, request_context.choice_index, first)
        if session.siblings is not None:
            session.siblings.begin(session.choice)
        self.extend(session, prefix)
        return session

    def append(self, session: SiblingSession, token_ids: Sequence[int], top_candidates: Candidates) -> None:
        start = max(session.first - (session.length - len(token_ids)), 0)
        if session.siblings is not None and start < len(token_ids):
            session.siblings.append(session.choice, token_ids[start:])

    def chains(self, session: SiblingSession, num_tokens: int, width: int) -> Iterator[Proposal]:
        if session.siblings is None:
            return
        found = session.siblings.followers(session.choice, self._max_match)
        first_ids: set[int] = set()
        for size in range(len(found), self._min_match - 1, -1):
            ids, counts = np.unique(session.siblings.ids_at(found[size - 1]), return_counts=True)
            for index in np.argsort(-counts, kind="stable"):
                if int(ids[index]) not in first_ids and len(first_ids) < width:
                    first_ids.add(int(ids[index]))
                    yield self._read(session.siblings, found[size - 1], int(ids[index]), size, num_tokens)
            if len(first_ids) >= width:
                return

    def _read(self, siblings: Siblings, indices: NDArray[np.intp], token: int, size: int, num_tokens: int) -> Proposal:
        """The most frequent continuation that begins with `token`; ties: the lowest id."""
        chain: list[int] = []
        confidences: list[int] = []
        while True:
            here = siblings.ids_at(indices)
            followed = here == token
            share = float(np.count_nonzero(followed)) / np.count_nonzero(here != SEPARATOR)
            chain.append(token)
            confidences.append(confidence_byte(size + len(chain) - 1, share))
            indices = indices[followed] + 1
            if len(chain) == num_tokens:
                break
            if len(indices) == 1:
                for token in siblings.read(int(indices[0]), num_tokens - len(chain)):
                    chain.append(token)
                    confidences.append(confidence_byte(size + len(chain) - 1, 1.0))
                break
            ids, counts = np.unique(siblings.ids_at(indices), return_counts=True)
            counts = np.where(ids == SEPARATOR, 0, counts)
            if not counts.any():
                break
            token = int(ids[np.argmax(counts)])
        return Proposal(tuple(chain), tuple(confidences))

    def close(self, session: SiblingSession) -> None:
        """The row stays: the choices that still write go on reading it."""
        session.siblings = None
