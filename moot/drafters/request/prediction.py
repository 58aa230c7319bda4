"""The drafter `prediction`: the answer that the client expects, as a draft.

OpenAI's `prediction`; aggressive decoding, arXiv 2106.04970. The output is followed through the prediction token by
token. Where they part, the output is looked for anew: the last n ids of it, the longest n that occurs behind the last
sure place, at the occurrence nearest to that place; without any, a run of two or more ids before it. Until something is
found it goes on as though every id written since that place had replaced one. A place is sure once `_SURE` ids in a row
were equal, so that a word found by chance does not lose the true place.

Confidence byte: 32 * level - 1, level 0 to 8 by the ids in a row that were equal up to here (0: nothing was found).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moot.core.options import option
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Candidates, DrafterOptions, ModelFreeDrafter, PrefixSession, RequestContext
from moot.drafters.lookup.matching import occurrences

_LEVELS = (1, 2, 3, 4, 6, 8, 16, 32)
_SURE = 4
_LEAST_BACKWARD = 2


@dataclass(frozen=True, kw_only=True)
class PredictionOptions(DrafterOptions):
    max_match: int = option(
        16, help="most last tokens of the output that are searched for in the prediction after an edit", minimum=1
    )


@dataclass(slots=True)
class PredictionSession(PrefixSession):
    prompt_length: int = 0
    text: array[int] = field(default_factory=lambda: array("I"))
    """The prediction."""
    tail: deque[int] = field(default_factory=deque)
    """The last ids of the output."""
    place: int = 0
    """Index of the id that is expected next."""
    run: int = 0
    """Ids in a row, up to `place`, that are those of the output."""
    sure: int = 0
    """The place after the last run that was no chance."""
    since: int = 0
    """Ids of the output after it."""

    @property
    def ids(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.text, dtype=np.uint32)


class PredictionDrafter(ModelFreeDrafter[PredictionSession]):
    kind = "prediction"

    def __init__(self, options: PredictionOptions) -> None:
        super().__init__(options)
        self._max_match = options.max_match

    def serves(self, request_context: RequestContext) -> bool:
        return bool(request_context.prediction_token_ids)

    def new_session(self) -> PredictionSession:
        return PredictionSession(tail=deque(maxlen=self._max_match))

    def open_request(
        self, prefix: Sequence[int], params: SamplingParams, request_context: RequestContext
    ) -> PredictionSession:
        session = self.new_session()
        session.prompt_length = request_context.prompt_length
        session.text = array("I", request_context.prediction_token_ids)
        self.extend(session, prefix)
        return session

    def append(self, session: PredictionSession, token_ids: Sequence[int], top_candidates: Candidates) -> None:
        num_output = session.length - session.prompt_length
        for token in token_ids[max(len(token_ids) - num_output, 0) :] if num_output > 0 else ():
            self._follow(session, token)

    def _follow(self, session: PredictionSession, token: int) -> None:
        session.tail.append(token)
        session.since += 1
        if session.place < len(session.text) and session.text[session.place] == token:
            session.place += 1
            session.run += 1
        else:
            session.place, session.run = self._found_again(session)
        if session.run >= _SURE:
            session.sure, session.since = session.place, 0

    def _found_again(self, session: PredictionSession) -> tuple[int, int]:
        """The place in the prediction, and the run of equal ids, after an id that was not expected."""
        found = occurrences(session.ids, session.tail) if session.text else []
        for size in range(len(found), 0, -1):
            behind = np.searchsorted(found[size - 1], session.sure, "right")
            if behind < len(found[size - 1]):
                return int(found[size - 1][behind]), size
        if len(found) >= _LEAST_BACKWARD:
            return int(found[-1][-1]), len(found)
        return session.sure + session.since, 0

    def chains(self, session: PredictionSession, num_tokens: int, width: int) -> Iterator[Proposal]:
        first_ids: set[int] = set()
        for place, run in self._places(session):
            ids = tuple(session.text[place : place + num_tokens])
            if ids and ids[0] not in first_ids:
                first_ids.add(ids[0])
                yield Proposal(ids, (_confidence(run),) * len(ids))
            if len(first_ids) >= width:
                return

    def _places(self, session: PredictionSession) -> Iterator[tuple[int, int]]:
        """The place that the output is taken to be at, then the others that its last ids speak for, with the run.

        None once the prediction is used up.
        """
        if session.place < len(session.text):
            yield session.place, session.run
            found = occurrences(session.ids, session.tail)
            for size in range(len(found), 0, -1):
                behind = int(np.searchsorted(found[size - 1], session.sure, "right"))
                for place in (*found[size - 1][behind:], *found[size - 1][:behind][::-1]):
                    yield int(place), size

    def close(self, session: PredictionSession) -> None:
        session.text = array("I")
        session.tail.clear()


def _confidence(run: int) -> int:
    return max(32 * bisect_right(_LEVELS, run) - 1, 0)
