"""Back-off n-grams: the most frequent follower of the longest context that was ever seen (Katz 1987, no discount).

With a table (built from texts, best from the target's own) the counts are its; without one they are learned online
from prompt + output. Chains take the most frequent follower again and again.

Confidence byte: 64 * n + floor(63 * count / (total + 1)): n the length of the context that was found, `count` of
`total` occurrences went on so; the added one keeps a context seen once from looking certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moot.config import option
from moot.proposers.base import Chain
from moot.proposers.model_free import ModelFreeProposer, PrefixSession
from moot.proposers.ngram_table import MAX_ORDER, NgramTable, Successors
from moot.proposers.options import ProposerOptions, require


@dataclass(frozen=True, kw_only=True)
class NgramOptions(ProposerOptions):
    table: Path | None = option(None, help="npz file of a trained table; without one, counts are learned online")
    max_order: int = option(3, help="longest context, in tokens")
    min_order: int = option(1, help="shortest context, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.min_order <= self.max_order <= MAX_ORDER, "max_order", f"must be min_order..{MAX_ORDER}")


@dataclass(slots=True)
class _Followers:
    counts: dict[int, int] = field(default_factory=dict)
    best: int = -1
    """The most frequent follower, the most recent among equals: kept up to date, as it is asked for most."""
    total: int = 0

    def add(self, token: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        self.total += 1
        if count >= self.counts.get(self.best, 0):
            self.best = token


@dataclass(slots=True)
class NgramSession(PrefixSession):
    tail: list[int] = field(default_factory=list)
    """The last tokens of the prefix, as many as the longest context has."""
    learned: dict[tuple[int, ...], _Followers] = field(default_factory=dict)


class NgramProposer(ModelFreeProposer[NgramSession]):
    kind = "ngram"

    def __init__(self, options: NgramOptions) -> None:
        super().__init__(options)
        self._table = NgramTable.load(options.table) if options.table else None
        self._max_order = min(options.max_order, self._table.max_order if self._table else MAX_ORDER)
        self._min_order = options.min_order

    def new_session(self) -> NgramSession:
        return NgramSession()

    def append(self, session: NgramSession, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]]) -> None:
        if self._table is None:
            self._learn(session, token_ids)
        session.tail = [*session.tail, *token_ids][-self._max_order :]

    def _learn(self, session: NgramSession, token_ids: Sequence[int]) -> None:
        tokens = [*session.tail, *token_ids]
        learned = session.learned
        for index in range(len(session.tail), len(tokens)):
            for size in range(self._min_order, min(self._max_order, index) + 1):
                context = tuple(tokens[index - size : index])
                followers = learned.get(context)
                if followers is None:
                    followers = learned[context] = _Followers()
                followers.add(tokens[index])

    def chains(self, session: NgramSession, num_tokens: int, width: int) -> Iterator[Chain]:
        first_ids: dict[int, int] = {}
        for size in range(min(self._max_order, len(session.tail)), self._min_order - 1, -1):
            found = self._successors(session, session.tail[-size:], width)
            if found is not None:
                for token, count in zip(found.token_ids, found.counts, strict=True):
                    first_ids.setdefault(token, _byte(size, count, found.total))
            if len(first_ids) >= width:
                break
        for token, byte in list(first_ids.items())[:width]:
            yield self._chain(session, token, byte, num_tokens)

    def _chain(self, session: NgramSession, token: int, byte: int, num_tokens: int) -> Chain:
        tail = [*session.tail, token]
        ids, confidences = [token], [byte]
        while len(ids) < num_tokens:
            for size in range(min(self._max_order, len(tail)), self._min_order - 1, -1):
                found = self._successors(session, tail[-size:], 1)
                if found is not None:
                    ids.append(found.token_ids[0])
                    confidences.append(_byte(size, found.counts[0], found.total))
                    tail.append(found.token_ids[0])
                    break
            else:
                break
        return Chain(tuple(ids), tuple(confidences))

    def _successors(self, session: NgramSession, context: Sequence[int], width: int) -> Successors | None:
        if self._table is not None:
            return self._table.lookup(context)
        followers = session.learned.get(tuple(context))
        if followers is None:
            return None
        counts = followers.counts
        if width == 1:
            return Successors((followers.best,), (counts[followers.best],), followers.total)
        ranked = sorted(counts, key=lambda token: (-counts[token], token != followers.best, token))
        return Successors(tuple(ranked), tuple(counts[token] for token in ranked), followers.total)

    def close(self, session: NgramSession) -> None:
        session.tail, session.learned = [], {}


def _byte(order: int, count: int, total: int) -> int:
    return 64 * order + 63 * count // (total + 1)
