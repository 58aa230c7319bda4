"""Training text as trainers read it: which rows are learned from, frequent ids, and positions picked at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moot.core.errors import ConfigError
from moot.training.script import ANSWERS, BEGIN, is_written
from moot.training.store import Shard, TextStore, is_held_out


@dataclass(frozen=True, slots=True)
class Text:
    """The first shards of a store. Which ones decides what is learned, so it is counted, not all that is there."""

    shards: Sequence[Shard]

    @classmethod
    def of(cls, store: TextStore, num_positions: int) -> Text:
        """The first shards that have `num_positions` together. Raises ConfigError where there are not so many."""
        shards: list[Shard] = []
        total = 0
        for number, index in enumerate(store.indices()):
            if total >= num_positions or index != number:
                break
            shards.append(store.read(index))
            total += shards[-1].num_positions
        if total < num_positions:
            raise ConfigError(f"{store.folder} has {total} positions of text in a row, {num_positions} are wanted")
        return cls(shards)

    @property
    def num_positions(self) -> int:
        return sum(shard.num_positions for shard in self.shards)

    def rows(self, held_out: bool) -> Iterator[tuple[Shard, int]]:
        for shard in self.shards:
            for row in range(len(shard.token_ids)):
                if is_held_out(row) == held_out:
                    yield shard, row

    def contexts(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], Tensor]]:
        """Of each context in held-out rows: ids, roles, and states bfloat16 [positions, width]."""
        for shard, row in self.rows(held_out=True):
            states = shard.states(row)
            ids, roles = shard.token_ids[row].astype(np.int64), np.asarray(shard.roles[row])
            borders = np.append(np.flatnonzero(roles == BEGIN), len(roles))
            for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
                yield ids[first:end], roles[first:end], states[first:end]

    def frequent_ids(self, count: int) -> NDArray[np.int64]:
        """Up to `count` ids that the target wrote most often (ties: the lowest), ascending."""
        return np.sort(self.by_frequency(count))

    def by_frequency(self, count: int) -> NDArray[np.int64]:
        """The same, the most frequent first (ties: ascending)."""
        written = [shard.token_ids[row][is_written(shard.roles[row])] for shard, row in self.rows(held_out=False)]
        ids, counts = np.unique(np.concatenate(written), return_counts=True)
        order = np.lexsort((ids, -counts))[:count]
        return ids[order].astype(np.int64)

    def written(self, held_out: bool = False) -> Iterator[list[int]]:
        """What the target wrote: answers and its own users' turns, each stretch one text."""
        for shard, row in self.rows(held_out):
            inside = np.concatenate(([False], is_written(shard.roles[row]), [False]))
            borders = np.flatnonzero(inside[1:] != inside[:-1])
            for first, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
                yield shard.token_ids[row, first:end].tolist()


@dataclass(frozen=True, slots=True)
class Window:
    """Of n starts: `token_ids` int64, `roles` uint8, `log_totals` float32: [n, length]; `states` bfloat16 [n, length,
    width]."""

    token_ids: Tensor
    roles: Tensor
    states: Tensor
    log_totals: Tensor


class Starts:
    """Windows of rows: positions with `before` before them and `length` from them on, of which the one `written`
    further was written by the target; in an order that the seed shuffles anew for each pass.

    `within`: windows lie in one context. `held_out`: of the rows that nothing is learned from, answers only.
    """

    def __init__(
        self, text: Text, before: int, length: int, written: int, seed: int, within: bool, held_out: bool = False
    ) -> None:
        self._text, self._before, self._length, self._seed = text, before, length, seed
        found = []
        for number, shard in enumerate(text.shards):
            rows = [row for row in range(len(shard.token_ids)) if is_held_out(row) == held_out]
            roles = np.asarray(shard.roles[rows])
            last = roles.shape[1] - length
            if last <= before:
                continue
            there = roles[:, before + written : last + written]
            wanted = np.isin(there, ANSWERS) if held_out else is_written(there)
            if within:
                begun = np.cumsum(roles == BEGIN, axis=1)
                wanted &= begun[:, : last - before] == begun[:, before + length - 1 : last + length - 1]
            at = np.argwhere(wanted)
            picked = np.empty((len(at), 3), np.int64)
            picked[:, 0], picked[:, 1], picked[:, 2] = number, np.array(rows)[at[:, 0]], at[:, 1] + before
            found.append(picked)
        self._all = np.concatenate(found) if found else np.empty((0, 3), np.int64)
        if not len(self._all):
            raise ConfigError("the training text has no stretch that is long enough")
        self._pass, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._all)

    def batch(self, step: int, count: int) -> Window:
        """The starts of a step: `count` of them, passes over all one after the other."""
        numbers = np.arange(step * count, (step + 1) * count)
        picked = np.concatenate([self._shuffled(one)[numbers[numbers // len(self) == one] % len(self)]
                                 for one in np.unique(numbers // len(self)).tolist()])  # fmt: skip
        return self.read(self._all[picked])

    def _shuffled(self, number: int) -> NDArray[np.int64]:
        if number != self._pass:
            self._pass, self._order = number, np.random.default_rng((self._seed, number)).permutation(len(self))
        return self._order

    def read(self, starts: NDArray[np.int64]) -> Window:
        """`starts` int64 [n, 3]: shard, row, position."""
        count, span = len(starts), self._before + self._length
        width = self._text.shards[0].hidden.shape[2]
        token_ids = np.empty((count, span), np.int64)
        roles = np.empty((count, span), np.uint8)
        hidden = np.empty((count, span, width), np.uint16)
        log_totals = np.empty((count, span), np.float32)
        for number in np.unique(starts[:, 0]).tolist():
            own = np.flatnonzero(starts[:, 0] == number)
            rows = starts[own, 1][:, None]
            columns = starts[own, 2][:, None] + np.arange(-self._before, self._length)
            shard = self._text.shards[number]
            token_ids[own] = shard.token_ids[rows, columns]
            roles[own] = shard.roles[rows, columns]
            hidden[own] = shard.hidden[rows, columns]
            log_totals[own] = shard.log_totals[rows, columns]
        states = torch.from_numpy(hidden.view(np.int16)).view(torch.bfloat16)
        return Window(torch.from_numpy(token_ids), torch.from_numpy(roles), states, torch.from_numpy(log_totals))
