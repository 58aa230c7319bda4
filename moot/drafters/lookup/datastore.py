"""A read-only datastore of texts: a suffix array over token ids, memory-mapped, shared by all requests of a process.

The array sorts all positions by the tokens *before* them, read backwards: places after the same suffix lie side by
side, and among them the token before that suffix ascends. So the longest suffix of a prefix that occurs in the texts is
found token by token, each narrowing the range, until none is left.

A folder: `tokens.npy` [n] uint32 (texts one after another, a separator before each and after the last), `order.npy`
[positions] uint32 and `meta.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moot.core.errors import ConfigError

SEPARATOR = 0xFFFFFFFF
"""Stands between texts; no id equals it, so no match and no continuation crosses it."""
DEPTH = 16
"""Matches are at most this long: the order is by so many tokens."""
MAX_OCCURRENCES = 256
"""Of a match with more occurrences, so many evenly spaced ones are looked at."""
_FORMAT = 1
_COMMON = 16
"""Occurrences from which on what follows is kept: it takes time to count, and will be asked for again."""
_MOST_COMMON = 4096
"""Of these, so many are kept, less than 2 KB each."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """`shares[i]`: part of the occurrences that agreed with the ids before i which went on with id i."""

    match_length: int = 0
    support: int = 0
    """Occurrences of the match."""
    token_ids: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()


def build(texts: Iterable[Sequence[int]], path: Path, tokenizer_fingerprint: str = "") -> None:
    """Write the datastore of `texts` (token ids each) to the folder `path`, replacing one that is there.
    `tokenizer_fingerprint`: of the tokenizer whose ids these are; empty: not known.

    Time O(n log n) for n tokens, memory about 40 bytes a token. Raises ConfigError when there is no token or more
    than 2^32 - 1, OSError when it cannot be written.
    """
    parts: list[NDArray[np.uint32]] = [np.array([SEPARATOR], np.uint32)]
    for text in texts:
        parts += [np.asarray(text, np.uint32), parts[0]]
    tokens = np.concatenate(parts)
    num_stored = int(np.count_nonzero(tokens != SEPARATOR))
    if num_stored == 0 or len(tokens) >= SEPARATOR:
        raise ConfigError(f"a datastore holds at least one token and less than 2^32 with separators, not {num_stored}")
    order = _order(tokens)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    np.save(temporary / "tokens.npy", tokens)
    np.save(temporary / "order.npy", order)
    meta = {"format": _FORMAT, "depth": DEPTH, "num_tokens": len(tokens), "tokenizer": tokenizer_fingerprint}
    (temporary / "meta.json").write_text(json.dumps(meta))
    if path.exists():
        shutil.rmtree(path)
    temporary.replace(path)


def _order(tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Positions p (a token stands before and at p), sorted by tokens[p-1], tokens[p-2], ...; equal ones by p.

    Prefix doubling: after each pass, ranks order by twice as many tokens.
    """
    _, rank = np.unique(tokens, return_inverse=True)
    rank = rank.astype(np.uint64)  # of the reading that starts at i and goes backwards
    width = 1
    while width < DEPTH:
        # Before the text's begin nothing follows: rank 0, all others are moved up by one.
        earlier = np.zeros_like(rank)
        earlier[width:] = rank[:-width] + np.uint64(1)
        _, rank = np.unique((rank << np.uint64(32)) | earlier, return_inverse=True)
        rank = rank.astype(np.uint64)
        width *= 2
    positions = np.arange(1, len(tokens), dtype=np.uint32)
    positions = positions[(tokens[1:] != SEPARATOR) & (tokens[:-1] != SEPARATOR)]
    order: NDArray[np.uint32] = positions[np.argsort(rank[positions - 1], kind="stable")]
    return order


class Datastore:
    """Opens the folder written by `build`. Raises ConfigError when it is not one. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        try:
            meta = json.loads((path / "meta.json").read_text())
            self._tokens: NDArray[np.uint32] = np.load(path / "tokens.npy", mmap_mode="r")
            self._order: NDArray[np.uint32] = np.load(path / "order.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot open datastore {path}: {error}") from error
        if meta.get("format") != _FORMAT or meta.get("depth") != DEPTH or meta.get("num_tokens") != len(self._tokens):
            raise ConfigError(f"datastore {path} has another format: build it again")
        self.tokenizer_fingerprint = str(meta.get("tokenizer", ""))
        # Single numbers come out of a memoryview several times faster than out of a mapped array.
        self._token_at, self._order_at = memoryview(self._tokens), memoryview(self._order)
        self._ranges: dict[int, tuple[int, int]] = {}
        """Ranges of suffixes of one token, kept as they are asked for."""
        self._common: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[float, ...]]] = {}
        """By the range of a match and the number of ids."""

    def __len__(self) -> int:
        """Tokens held, separators not counted."""
        return int(np.count_nonzero(self._tokens != SEPARATOR))

    def continuation(self, prefix: Sequence[int], num_tokens: int) -> Continuation:
        """The most frequent continuation, up to `num_tokens` ids, of the longest suffix of `prefix` that occurs.

        Id by id the most frequent among the occurrences left; ties: the lowest id.
        """
        first, last, length = self._longest(prefix[: -DEPTH - 1 : -1])
        if length == 0:
            return Continuation()
        support = last - first
        known = self._common.get((first, last, num_tokens))
        if known is None:
            step = -(-support // MAX_OCCURRENCES)
            known = self._most_frequent(self._order_at[first:last:step].tolist(), num_tokens)
            if support >= _COMMON:
                if len(self._common) >= _MOST_COMMON:
                    self._common.clear()
                self._common[first, last, num_tokens] = known
        return Continuation(length, support, *known)

    def _longest(self, pattern: Sequence[int]) -> tuple[int, int, int]:
        """The range in the order of the longest match of `pattern` (last token first), and the match's length."""
        first, last, length = 0, len(self._order), 0
        for token in pattern:
            found = self._narrowed(first, last, length, token)
            if found[0] == found[1]:
                break
            first, last = found
            length += 1
        return first, last, length

    def _narrowed(self, first: int, last: int, length: int, token: int) -> tuple[int, int]:
        """Those of the places `first` to `last`, which have `length` tokens before them in common, that have `token`
        before these."""
        if token == SEPARATOR:
            return first, first
        if length == 0:
            if token not in self._ranges:
                self._ranges[token] = self._bisected(first, last, 1, token)
            return self._ranges[token]
        return self._bisected(first, last, length + 1, token)

    def _bisected(self, first: int, last: int, back: int, token: int) -> tuple[int, int]:
        tokens, order = self._token_at, self._order_at

        def before(position: int) -> int:
            return tokens[position - back]

        begin = bisect_left(order, token, first, last, key=before)
        if begin == last or tokens[order[begin] - back] != token:
            return begin, begin
        # Most ranges are short: their end is looked for from their begin, in growing steps.
        step = 1
        while begin + step < last and tokens[order[begin + step] - back] == token:
            step *= 2
        return begin, bisect_right(order, token, begin + step // 2, min(begin + step, last), key=before)

    def _most_frequent(self, positions: list[int], num_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        tokens = self._token_at
        ids: list[int] = []
        shares: list[float] = []
        for depth in range(num_tokens):
            if len(positions) == 1:
                rest = tokens[positions[0] + depth : positions[0] + num_tokens].tolist()
                rest = rest[: rest.index(SEPARATOR)] if SEPARATOR in rest else rest
                return (*ids, *rest), (*shares, *[1.0] * len(rest))
            # In range: a separator ends the texts and ends the chain.
            followers = [tokens[position + depth] for position in positions]
            counts = Counter(followers)
            del counts[SEPARATOR]
            if not counts:
                break
            support = max(counts.values())
            token = min(one for one, count in counts.items() if count == support)
            ids.append(token)
            shares.append(support / len(positions))
            if support < len(positions):
                positions = [one for one, other in zip(positions, followers, strict=True) if other == token]
        return tuple(ids), tuple(shares)
