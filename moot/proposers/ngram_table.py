"""Counts of what follows each context of 1 to 3 tokens, as sorted arrays: built from texts, saved as one npz file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moot.core.errors import ConfigError
from moot.proposers.options import MAX_VOCAB_SIZE

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


def context_key(context: Sequence[int]) -> int:
    """The ids packed into one number; at most MAX_ORDER of them."""
    key = 0
    for token in context:
        key = (key << _BITS) | token
    return key


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
        key = np.uint64(context_key(context))
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
