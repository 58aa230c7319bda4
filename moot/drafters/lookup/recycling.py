"""The drafter `recycling` (arXiv 2408.08696): each token remembers what the target last thought might come after it.

The row of a token: the id that was committed after it most recently, then the target's other candidates there (when the
router passes them on), most likely first. A chain follows first entries; further chains start from further entries.
Prompt bigrams fill the table at first. A table shared by all sessions of the process (`shared_rows`) is a fall-back for
tokens that the session has not seen; with it, proposals depend on other requests (the text never does).

Confidence byte: 32 * streak + 4 * (7 - rank): the streak (at most 7) counts how often in a row the first entry was
confirmed, rank is the entry's place in the row. Entries of the shared table: streak 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moot.core.options import option
from moot.core.types import Proposal
from moot.drafters.interface import Candidates, DrafterOptions, ModelFreeDrafter, PrefixSession

MAX_CANDIDATES = 8


@dataclass(frozen=True, kw_only=True)
class RecyclingOptions(DrafterOptions):
    num_candidates: int = option(MAX_CANDIDATES, help="entries kept per token", minimum=1, maximum=MAX_CANDIDATES)
    shared_rows: int = option(
        0,
        help="rows of a table shared by all sessions, the least recently used dropped first; 0: no such table",
        minimum=0,
    )


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    streak: int = 0


@dataclass(slots=True)
class RecyclingSession(PrefixSession):
    last: int = -1
    """Last token of the prefix; -1 while it is empty."""
    rows: dict[int, _Row] = field(default_factory=dict)


class RecyclingDrafter(ModelFreeDrafter[RecyclingSession]):
    kind = "recycling"
    new_session = RecyclingSession

    def __init__(self, options: RecyclingOptions) -> None:
        super().__init__(options)
        self._num_candidates = options.num_candidates
        self._max_shared = options.shared_rows
        self.shares_sessions = options.shared_rows > 0
        self._shared: OrderedDict[int, list[int]] = OrderedDict()

    def append(self, session: RecyclingSession, token_ids: Sequence[int], top_candidates: Candidates) -> None:
        last, rows = session.last, session.rows
        for index, token in enumerate(token_ids):
            candidates = top_candidates[index] if index < len(top_candidates) else ()
            if last >= 0:
                self._observe(rows, last, token, candidates)
            last = token
        session.last = last

    def _observe(self, rows: dict[int, _Row], before: int, token: int, candidates: Sequence[int]) -> None:
        row = rows.get(before)
        if row is None:
            row = rows[before] = _Row([token])
        elif row.token_ids[0] == token:
            row.streak = min(row.streak + 1, 7)
        else:
            row.streak = 0
        # New candidates go before remembered ones; an id stands once, at its first place.
        merged = dict.fromkeys((token, *candidates, *row.token_ids))
        row.token_ids = list(merged)[: self._num_candidates]
        if self._max_shared:
            self._shared[before] = row.token_ids
            self._shared.move_to_end(before)
            if len(self._shared) > self._max_shared:
                self._shared.popitem(last=False)

    def chains(self, session: RecyclingSession, num_tokens: int, width: int) -> Iterator[Proposal]:
        for rank, token in enumerate(self._row(session, session.last).token_ids[:width]):
            yield self._chain(session, rank, token, num_tokens)

    def _chain(self, session: RecyclingSession, rank: int, token: int, num_tokens: int) -> Proposal:
        ids = [token]
        confidences = [_byte(self._row(session, session.last).streak, rank)]
        while len(ids) < num_tokens:
            row = self._row(session, ids[-1])
            if not row.token_ids:
                break
            ids.append(row.token_ids[0])
            confidences.append(_byte(row.streak, 0))
        return Proposal(tuple(ids), tuple(confidences))

    def ids_after(self, session: RecyclingSession, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        ids: list[int] = []
        row = self._row(session, path[-1] if path else session.last)
        while row.token_ids and len(ids) < num_tokens:
            ids.append(row.token_ids[0])
            row = self._row(session, ids[-1])
        return tuple(ids)

    def _row(self, session: RecyclingSession, token: int) -> _Row:
        return session.rows.get(token) or _Row(self._shared.get(token, []))

    def close(self, session: RecyclingSession) -> None:
        session.rows = {}


def _byte(streak: int, rank: int) -> int:
    return 32 * (streak if rank == 0 else 0) + 4 * (7 - rank)
