"""The drafter `ngram`: the most frequent follower of the longest context that was ever seen (Katz 1987, no discount).

`NgramTable` holds counts of what follows each context of 1 to 3 tokens, as sorted arrays: built from texts, best from
the target's own, and saved as one npz file. Without a table, counts are learned online from the last
`max_indexed_tokens` of prompt + output. Chains take the most frequent follower again and again.

Confidence byte: 64 * n + floor(63 * count / (total + 1)): n the length of the context that was found, `count` of
`total` occurrences went on so; the added one keeps a context seen once from looking certain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moot.core.errors import ConfigError
from moot.core.options import option, option_of
from moot.core.types import Proposal
from moot.drafters.interface import (
    MAX_VOCAB_SIZE,
    Candidates,
    IndexingOptions,
    ModelFreeDrafter,
    PrefixSession,
    require,
    window_start,
)
from moot.shipped import locate

MAX_ORDER = 3
"""Longest context: three ids of 21 bits are one 64-bit key."""
_BITS = MAX_VOCAB_SIZE.bit_length() - 1
_FORMAT = 1
TABLE = "table.npz"


class Successors(NamedTuple):
    """`token_ids`: most frequent first (ties: the lowest id); `counts` beside them; `total` counts all, kept or not."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]
    total: int


@dataclass(frozen=True, slots=True)
class _Order:
    """Contexts of one length: `keys` [rows] uint64 ascending; row r has entries starts[r] to starts[r + 1]."""

    keys: NDArray[np.uint64]
    totals: NDArray[np.int64]
    starts: NDArray[np.int64]
    token_ids: NDArray[np.uint32]
    counts: NDArray[np.int64]


class NgramTable:
    def __init__(self, orders: Sequence[_Order], tokenizer_fingerprint: str = "") -> None:
        """`tokenizer_fingerprint`: of the tokenizer whose ids these are; empty: not known."""
        self._orders = tuple(orders)
        self.tokenizer_fingerprint = tokenizer_fingerprint

    @property
    def max_order(self) -> int:
        return len(self._orders)

    def lookup(self, context: Sequence[int]) -> Successors | None:
        """What followed exactly these ids, or None. `context` has 1 to `max_order` ids."""
        if max(context) >= MAX_VOCAB_SIZE:
            return None
        order = self._orders[len(context) - 1]
        key = np.uint64(_packed(context, _BITS))
        row = int(order.keys.searchsorted(key))
        if row == len(order.keys) or order.keys[row] != key:
            return None
        entries = slice(int(order.starts[row]), int(order.starts[row + 1]))
        return Successors(
            tuple(order.token_ids[entries].tolist()), tuple(order.counts[entries].tolist()), int(order.totals[row])
        )

    @classmethod
    def build(
        cls,
        texts: Iterable[Sequence[int]],
        max_order: int = MAX_ORDER,
        num_successors: int = 4,
        tokenizer_fingerprint: str = "",
    ) -> NgramTable:
        """Count every text (token ids) on its own; keep the `num_successors` most frequent followers per context.

        Raises ConfigError for an id outside 0 to MAX_VOCAB_SIZE - 1 or an order outside 1 to MAX_ORDER.
        """
        if not 1 <= max_order <= MAX_ORDER or num_successors < 1:
            raise ConfigError(f"an n-gram table has contexts of 1 to {MAX_ORDER} tokens and at least one successor")
        arrays = [np.asarray(text, np.int64) for text in texts]
        if any(len(text) and (text.min() < 0 or text.max() >= MAX_VOCAB_SIZE) for text in arrays):
            raise ConfigError(f"an n-gram table holds ids from 0 to {MAX_VOCAB_SIZE - 1}")
        orders = [_count(arrays, order, num_successors) for order in range(1, max_order + 1)]
        return cls(orders, tokenizer_fingerprint)

    def save(self, path: Path) -> None:
        arrays = {
            f"{name}_{size}": getattr(order, name)
            for size, order in enumerate(self._orders, start=1)
            for name in _Order.__slots__
        }
        with path.open("wb") as file:
            head = {"format": np.array([_FORMAT, self.max_order]), "tokenizer": np.array(self.tokenizer_fingerprint)}
            np.savez_compressed(file, allow_pickle=False, **head, **arrays)

    @classmethod
    def load(cls, path: Path) -> NgramTable:
        """`path`: the file, or the folder in which it is TABLE. Raises ConfigError where there is none of `save`."""
        path = path / TABLE if path.is_dir() else path
        try:
            with np.load(path, allow_pickle=False) as file:
                version, max_order = file["format"].tolist()
                if version != _FORMAT:
                    raise ConfigError(f"n-gram table {path} has another format: build it again")
                return cls(
                    [
                        _Order(**{name: file[f"{name}_{size}"] for name in _Order.__slots__})
                        for size in range(1, max_order + 1)
                    ],
                    str(file["tokenizer"]) if "tokenizer" in file else "",
                )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot open n-gram table {path}: {error}") from error


def _count(texts: Sequence[NDArray[np.int64]], order: int, num_successors: int) -> _Order:
    keys, followers = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for text in texts:
        length = len(text) - order
        if length < 1:
            continue
        key = np.zeros(length, np.uint64)
        for offset in range(order):
            key = (key << np.uint64(_BITS)) | text[offset : offset + length].astype(np.uint64)
        keys.append(key)
        followers.append(text[order:])
    key, follower = np.concatenate(keys), np.concatenate(followers)
    pairs, counts = np.unique(np.stack([key, follower.astype(np.uint64)], axis=1), axis=0, return_counts=True)
    # Context ascending, then count descending, then id ascending.
    rank = np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))
    pairs, counts = pairs[rank], counts[rank].astype(np.int64)
    unique_keys, starts = np.unique(pairs[:, 0], return_index=True)
    totals = np.add.reduceat(counts, starts) if len(starts) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(starts, len(pairs)))
    kept = np.arange(len(pairs)) - np.repeat(starts, sizes) < num_successors
    return _Order(
        keys=unique_keys,
        totals=totals,
        starts=np.append(0, np.cumsum(np.minimum(sizes, num_successors))).astype(np.int64),
        token_ids=pairs[kept, 1].astype(np.uint32),
        counts=counts[kept],
    )


@dataclass(frozen=True, kw_only=True)
class NgramOptions(IndexingOptions):
    table: Path | None = option(
        None, help="npz file of a trained table, or its folder; none: counts are learned online"
    )
    max_order: int = option(3, help="longest context, in tokens", minimum=1, maximum=MAX_ORDER)
    min_order: int = option(1, help="shortest context, in tokens", minimum=1)
    max_indexed_tokens: int = option_of(
        IndexingOptions, "max_indexed_tokens", help="last tokens that online counts are made of, at most"
    )

    def check_together(self) -> None:
        require(self.min_order <= self.max_order, "max_order", "must not be below min_order")


_ID_BITS = 32
"""Ids as they may come over the wire."""


@dataclass(slots=True)
class _Followers:
    """Followers of a context that was seen more than once."""

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


class NgramDrafter(ModelFreeDrafter[NgramSession]):
    kind = "ngram"
    new_session = NgramSession

    def __init__(self, options: NgramOptions) -> None:
        super().__init__(options)
        self._table = NgramTable.load(locate(options.table)) if options.table else None
        self.tokenizer_fingerprint = self._table.tokenizer_fingerprint if self._table else ""
        self._max_order = min(options.max_order, self._table.max_order if self._table else MAX_ORDER)
        self._min_order = options.min_order
        self._window = options.max_indexed_tokens

    def append(self, session: NgramSession, token_ids: Sequence[int], top_candidates: Candidates) -> None:
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
                key = _packed(tokens[index - size : index], _ID_BITS, 1)
                followers = learned.get(key)
                if followers is None:
                    learned[key] = token
                    continue
                if isinstance(followers, int):
                    seen, followers = followers, _Followers()
                    followers.add(seen)
                    learned[key] = followers
                followers.add(token)

    def chains(self, session: NgramSession, num_tokens: int, width: int) -> Iterator[Proposal]:
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
    ) -> Proposal:
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
        return Proposal(tuple(ids), tuple(confidences))

    def ids_after(self, session: NgramSession, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        if not path:
            return super().ids_after(session, path, num_tokens)
        tail = [*session.tokens[-self._max_order :], *path]
        return self._chain(session, tail, [], [], num_tokens).token_ids

    def _successors(self, session: NgramSession, context: Sequence[int], width: int) -> Successors | None:
        if self._table is not None:
            return self._table.lookup(context)
        followers = session.learned.get(_packed(context, _ID_BITS, 1))
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


def _packed(context: Sequence[int], bits: int, key: int = 0) -> int:
    """The ids in one number, below `key`: with a leading one contexts of different lengths are different numbers."""
    for token in context:
        key = (key << bits) | token
    return key


def _byte(order: int, count: int, total: int) -> int:
    return 64 * order + 63 * count // (total + 1)
