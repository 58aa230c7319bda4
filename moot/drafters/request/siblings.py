"""The outputs of all choices of one prompt, side by side, as far as each choice's session has been told its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moot.drafters.lookup.matching import occurrences

SEPARATOR = 0xFFFFFFFF
"""Around every text; no id equals it, so nothing is matched across it."""
_FIRST_CAPACITY = 256


class Siblings:
    """A row of ids for each choice. Lives as long as the request; empty until a session writes into it.

    Memory: 4 bytes times choices times the longest output, at most doubled.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._lengths = [0] * num_choices
        self._rows: NDArray[np.uint32] = np.zeros((num_choices, 0), np.uint32)

    def begin(self, choice: int) -> None:
        """The row of `choice` is empty (again)."""
        if self._rows.shape[1]:
            self._rows[choice] = SEPARATOR
        self._lengths[choice] = 0

    def append(self, choice: int, token_ids: Sequence[int]) -> None:
        begin = self._lengths[choice] + 1
        end = begin + len(token_ids)
        while self._rows.shape[1] <= end:
            grown = np.full((self._num_choices, max(2 * self._rows.shape[1], _FIRST_CAPACITY)), SEPARATOR, np.uint32)
            grown[:, : self._rows.shape[1]] = self._rows
            self._rows = grown
        self._rows[choice, begin:end] = token_ids
        self._lengths[choice] = end - 1

    def tokens(self, choice: int, limit: int) -> list[int]:
        """The last `limit` ids of a choice's row."""
        end = self._lengths[choice] + 1
        last: list[int] = self._rows[choice, max(end - limit, 1) : end].tolist()
        return last

    def followers(self, choice: int, max_match: int) -> list[NDArray[np.intp]]:
        """Places where the other choices' texts go on. Entry n - 1: after the last n ids of this choice's. Indices for
        `ids_at`."""
        tail = self.tokens(choice, max_match)
        if not tail:
            return []
        flat = self._rows.reshape(-1)
        goes_on = np.append(flat[1:] != SEPARATOR, False)
        capacity = self._rows.shape[1]
        goes_on[choice * capacity : (choice + 1) * capacity] = False
        return occurrences(flat, tail, goes_on)

    def read(self, index: int, num_tokens: int) -> list[int]:
        """Up to `num_tokens` ids from `index` on, as far as that text goes."""
        ids: list[int] = self._rows.reshape(-1)[index : index + num_tokens].tolist()
        return ids[: ids.index(SEPARATOR)] if SEPARATOR in ids else ids

    def ids_at(self, indices: NDArray[np.intp]) -> NDArray[np.uint32]:
        """The ids there; SEPARATOR behind the end of a text."""
        return self._rows.reshape(-1)[indices]
