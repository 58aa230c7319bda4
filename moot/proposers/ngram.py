"""Back-off n-grams: the most frequent follower of the longest context that was ever seen (Katz 1987, no discount).

With a table (built from texts, best from the target's own) the counts are its; without one they are learned online
from the last `max_indexed_tokens` of prompt + output. Chains take the most frequent follower again and again.

Confidence byte: 64 * n + floor(63 * count / (total + 1)): n the length of the context that was found, `count` of
`total` occurrences went on so; the added one keeps a context seen once from looking certain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moot.config import option
from moot.proposers.base import Chain
from moot.proposers.model_free import ModelFreeProposer, PrefixSession, window_start
from moot.proposers.ngram_table import MAX_ORDER, NgramTable, Successors
from moot.proposers.options import ProposerOptions, require
from moot.shipped import locate


@dataclass(frozen=True, kw_only=True)
class NgramOptions(ProposerOptions):
    table: Path | None = option(
        None, help="npz file of a trained table, or its folder; none: counts are learned online"
    )
    max_order: int = option(3, help="longest context, in tokens")
    min_order: int = option(1, help="shortest context, in tokens")
    max_indexed_tokens: int = option(8192, help="online counts are of at most this many last tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.min_order <= self.max_order <= MAX_ORDER, "max_order", f"must be min_order..{MAX_ORDER}")
        require(self.max_indexed_tokens >= 2, "max_indexed_tokens", "must be at least 2")


_ID_BITS = 32
"""Ids as they may come over the wire."""


@dataclass(slots=True)
class _Followers:
    """Of a context that was seen more than once."""

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
    start: int = 0
    """Position of the first token of `tokens`."""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """With a table only as many as the longest context has, else all that the counts are of."""
    learned: dict[int, int | _Followers] = field(default_factory=dict)
    """By context, packed into one number. One that was seen once, as most are, has its follower's id for a value."""


class NgramProposer(ModelFreeProposer[NgramSession]):
    kind = "ngram"

    def __init__(self, options: NgramOptions) -> None:
        super().__init__(options)
        self._table = NgramTable.load(locate(options.table)) if options.table else None
        self.tokenizer_fingerprint = self._table.tokenizer_fingerprint if self._table else ""
        self._max_order = min(options.max_order, self._table.max_order if self._table else MAX_ORDER)
        self._min_order = options.min_order
        self._window = options.max_indexed_tokens

    def new_session(self) -> NgramSession:
        return NgramSession()

    def append(self, session: NgramSession, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]]) -> None:
        first_new = len(session.tokens)
        session.tokens.extend(token_ids)
        if self._table is not None:
            del session.tokens[: -self._max_order]
            return
        start = window_start(session.length, self._window)
        if start != session.start:
            del session.tokens[: start - session.start]
            session.start, session.learned, first_new = start, {}, 0
        self._learn(session, first_new)

    def _learn(self, session: NgramSession, first_new: int) -> None:
        tokens, learned = session.tokens, session.learned
        for index in range(first_new, len(tokens)):
            token = tokens[index]
            for size in range(self._min_order, min(self._max_order, index) + 1):
                key = _key(tokens[index - size : index])
                followers = learned.get(key)
                if followers is None:
                    learned[key] = token
                    continue
                if isinstance(followers, int):
                    seen, followers = followers, _Followers()
                    followers.add(seen)
                    learned[key] = followers
                followers.add(token)

    def chains(self, session: NgramSession, num_tokens: int, width: int) -> Iterator[Chain]:
        first_ids: dict[int, int] = {}
        for size in range(min(self._max_order, len(session.tokens)), self._min_order - 1, -1):
            found = self._successors(session, session.tokens[-size:], width)
            if found is not None:
                for token, count in zip(found.token_ids, found.counts, strict=True):
                    first_ids.setdefault(token, _byte(size, count, found.total))
            if len(first_ids) >= width:
                break
        for token, byte in list(first_ids.items())[:width]:
            tail = [*session.tokens[-self._max_order :], token]
            yield self._chain(session, tail, [token], [byte], num_tokens)

    def _chain(
        self, session: NgramSession, tail: list[int], ids: list[int], confidences: list[int], num_tokens: int
    ) -> Chain:
        """`ids`, the last ones of `tail`, made longer by what mostly follows it."""
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

    def ids_after(self, session: NgramSession, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        if not path:
            return super().ids_after(session, path, num_tokens)
        tail = [*session.tokens[-self._max_order :], *path]
        return self._chain(session, tail, [], [], num_tokens).token_ids

    def _successors(self, session: NgramSession, context: Sequence[int], width: int) -> Successors | None:
        if self._table is not None:
            return self._table.lookup(context)
        followers = session.learned.get(_key(context))
        if followers is None:
            return None
        if isinstance(followers, int):
            return Successors((followers,), (1,), 1)
        counts = followers.counts
        if width == 1:
            return Successors((followers.best,), (counts[followers.best],), followers.total)
        ranked = sorted(counts, key=lambda token: (-counts[token], token != followers.best, token))
        return Successors(tuple(ranked), tuple(counts[token] for token in ranked), followers.total)

    def close(self, session: NgramSession) -> None:
        session.tokens, session.learned = array("I"), {}


def _key(context: Sequence[int]) -> int:
    """The ids below a leading one, so that contexts of different lengths are different numbers."""
    key = 1
    for token in context:
        key = (key << _ID_BITS) | token
    return key


def _byte(order: int, count: int, total: int) -> int:
    return 64 * order + 63 * count // (total + 1)
