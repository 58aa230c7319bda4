"""What a row of training text consists of: forced ids, then ids that the target writes, then forced ones, and so on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moot.training.chat import Chat
from moot.training.prompts import Turn

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
