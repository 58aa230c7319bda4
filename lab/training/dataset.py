"""Training text as trainers read it: which rows are learned from, frequent ids, and positions picked at random.

What a row of training text consists of: forced ids, then ids that the target writes, then forced ones, and so on.

Training text on disk: shards of rows, each a folder of arrays that appears whole or not at all.

Of each position: the token's id, its role, and what the target makes of it: the id it finds likeliest to
come next, the logarithm of the sum of its exponentiated logits, and its last hidden state, bfloat16. With 576 numbers
in a state that is 1,165 bytes. Arrays are mapped into memory when read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.training.chat import Chat
from lab.training.prompts import Turn
from moot.core.errors import ConfigError

FORCED, GREEDY, SAMPLED, USER, BEGIN = range(5)
"""Roles of a position: given; the target's answer at temperature 0; above it; a user's turn that the target wrote;
given, and the first of a context: what stands before it in its row is not known there."""


ANSWERS = (GREEDY, SAMPLED)
COOLEST, HOTTEST = 0.7, 1.0
"""Answers that are not greedy have a temperature between these."""
_USER_TEMPERATURE, _LONGEST_USER_TURN = 0.9, 80


def is_written(roles: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether the target wrote it."""
    given: NDArray[np.bool_] = (roles == FORCED) | (roles == BEGIN)
    return ~given


@dataclass(frozen=True, slots=True)
class Stage:
    """`forced` ids, then at most `limit` ids by the target at `temperature`, up to its end token.

    `begins`: a context.
    """

    forced: Sequence[int]
    role: int
    temperature: float
    limit: int
    begins: bool = False


class Row:
    """One row while it is made. `temperature`: of the next token, 0 where it is greedy or forced."""

    def __init__(self, stages: Iterator[Stage], end_token_ids: frozenset[int]) -> None:
        self._stages = stages
        self._ends = end_token_ids
        self._forced: deque[int] = deque()
        self._written = 0
        self._begins = False
        self._begin(None)

    def _begin(self, last: int | None) -> None:
        self._stage = next(self._stages)
        self._written = 0
        self._begins = self._stage.begins
        self._forced.extend(self._stage.forced)
        # What ends a turn is there already when the target wrote it itself.
        if last is not None and not self._begins and self._forced and self._forced[0] == last:
            self._forced.popleft()

    @property
    def temperature(self) -> float:
        return 0.0 if self._forced else self._stage.temperature

    def take(self, written: int) -> tuple[int, int]:
        """The next id and its role: a forced one, else `written`, which the target would write here."""
        if self._forced:
            role, self._begins = BEGIN if self._begins else FORCED, False
            return self._forced.popleft(), role
        role = self._stage.role
        self._written += 1
        if written in self._ends or self._written == self._stage.limit:
            self._begin(written if written in self._ends else None)
        return written, role


def stages(
    chat: Chat, draw: Callable[[np.random.Generator], Sequence[Turn]], rng: np.random.Generator, longest_answer: int
) -> Iterator[Stage]:
    """Conversations without end, each in a context of its own; half of them are answered greedily."""
    while True:
        role, temperature = GREEDY, 0.0
        if rng.random() < 0.5:
            role, temperature = SAMPLED, float(rng.uniform(COOLEST, HOTTEST))
        for number, turn in enumerate(draw(rng)):
            first = number == 0
            if turn.is_open:
                yield Stage(chat.open_turn(turn.text, first), USER, _USER_TEMPERATURE, _LONGEST_USER_TURN, first)
                yield Stage(chat.after_open_turn(), role, temperature, longest_answer)
            else:
                yield Stage(chat.turn(turn.text, first), role, temperature, longest_answer, first)


_FORMAT = 1
_MANIFEST, _META = "manifest.json", "meta.json"


HELD_OUT_EVERY, HELD_OUT = 16, 3


def is_held_out(row: int) -> bool:
    """Whether nothing is learned from row number `row` of a shard: acceptance is reported on these rows."""
    return row % HELD_OUT_EVERY == HELD_OUT


@dataclass(frozen=True, slots=True)
class Shard:
    """`token_ids` and `best` uint32, `roles` uint8, `log_totals` float32: [rows, positions]; `hidden` [rows, positions,
    width] uint16, the bits of bfloat16 numbers."""

    token_ids: NDArray[np.uint32]
    roles: NDArray[np.uint8]
    best: NDArray[np.uint32]
    log_totals: NDArray[np.float32]
    hidden: NDArray[np.uint16]

    @property
    def num_positions(self) -> int:
        return int(self.token_ids.size)

    def states(self, rows: Any = slice(None)) -> Tensor:
        """bfloat16 [..., positions, width] of the given rows: a copy."""
        return torch.from_numpy(self.hidden[rows].copy().view(np.int16)).view(torch.bfloat16)


def bits(hidden: Tensor) -> NDArray[np.uint16]:
    """The bits of numbers rounded to bfloat16."""
    rounded: NDArray[np.int16] = hidden.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return rounded.view(np.uint16)


class TextStore:
    """A folder of shards. Shard i is a function of the manifest and i alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"no training text in {folder}: {error}") from error
        if self.manifest.get("format") != _FORMAT:
            raise ConfigError(f"training text in {folder} has another format: make it again")

    @classmethod
    def create(cls, folder: Path, manifest: Mapping[str, Any]) -> TextStore:
        """Open it, or make it where there is none. Raises ConfigError when it is there with another manifest."""
        wanted = {"format": _FORMAT, **manifest}
        if not (folder / _MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{_MANIFEST}.{os.getpid()}"
            temporary.write_text(json.dumps(wanted, indent=1) + "\n")
            temporary.replace(folder / _MANIFEST)
        store = cls(folder)
        if store.manifest != wanted:
            raise ConfigError(f"training text in {folder} was made with other settings")
        return store

    def __contains__(self, index: int) -> bool:
        return (self._path(index) / _META).is_file()

    def indices(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self.folder.glob(f"[0-9]*/{_META}"))

    def meta(self, index: int) -> dict[str, Any]:
        """`shape` [rows, positions], `numerics`, `seconds`."""
        meta: dict[str, Any] = json.loads((self._path(index) / _META).read_text())
        return meta

    @property
    def num_positions(self) -> int:
        return sum(int(np.prod(self.meta(index)["shape"])) for index in self.indices())

    def write(self, index: int, shard: Shard, meta: Mapping[str, Any]) -> None:
        """Raises OSError; the shard is there only if it is complete."""
        temporary = self.folder / f".{index:05d}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name in Shard.__slots__:
            np.save(temporary / f"{name}.npy", getattr(shard, name))
        (temporary / _META).write_text(json.dumps({"shape": shard.token_ids.shape, **meta}) + "\n")
        try:
            temporary.rename(self._path(index))
        except OSError:
            if index not in self:
                raise
            # Somebody else made the same shard meanwhile: it is equal.
            shutil.rmtree(temporary)

    def read(self, index: int) -> Shard:
        folder = self._path(index)
        try:
            return Shard(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Shard.__slots__))
        except (OSError, ValueError) as error:
            raise ConfigError(f"training text {folder} cannot be read: {error}") from error

    def shards(self) -> Iterator[tuple[int, Shard]]:
        for index in self.indices():
            yield index, self.read(index)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}"


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The first shards of a store. Which ones decides what is learned, so it is counted, not all that is there."""

    shards: Sequence[Shard]

    @classmethod
    def of(cls, store: TextStore, num_positions: int) -> TrainingText:
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
            attached = np.concatenate(([False], is_written(shard.roles[row]), [False]))
            borders = np.flatnonzero(attached[1:] != attached[:-1])
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
        self,
        text: TrainingText,
        before: int,
        length: int,
        written: int,
        seed: int,
        within: bool,
        held_out: bool = False,
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
