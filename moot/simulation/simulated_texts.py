"""Simulated texts: the text of each request, and what each drafter proposes at each place of it.

`RandomTexts` draws: a drafter's token at depth j is right with a chance that is given per depth, and drafters may be
wrong together. A recorded text with real drafters is another `Texts` (lab.bench.simulate has one).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moot.core.types import Proposal

_WRONG = 1 << 20
_CONFIDENCE = 128


class SimulatedText(Protocol):
    """The text of one request. Positions count output tokens from 0."""

    prompt_token_ids: tuple[int, ...]
    num_output: int
    num_cached_tokens: int
    """Of the prompt, in the verifier's prefix cache."""

    def token(self, position: int) -> int:
        """The target's token at a position."""
        ...

    def propose(self, drafter: int, position: int, length: int, head: Proposal) -> Proposal:
        """What drafter number `drafter` proposes after `position` tokens, at most `length`; `head`: what it has already
        drafted from there."""
        ...


class Texts(Protocol):
    def next(self) -> SimulatedText: ...


@dataclass(frozen=True, slots=True)
class LoadClass:
    """A share of the requests. `skill`: factor on every drafter's chances, for text that is easier or harder."""

    share: float = 1.0
    prompt_tokens: int = 200
    output_tokens: int = 128
    skill: float = 1.0


class RandomTexts:
    """Random texts. `chances[d][j]`: P(drafter d right at depth j | right before); the last holds from there on.
    `correlation`: the part of positions at which all drafters share one draw, so that they are right or wrong
    together."""

    def __init__(
        self, classes: Sequence[LoadClass], chances: Sequence[Sequence[float]], correlation: float, seed: int
    ) -> None:
        self._classes = classes
        self._chances = chances
        self._correlation = correlation
        self._random = random.Random(seed)

    def next(self) -> SimulatedText:
        (kind,) = self._random.choices(self._classes, [one.share for one in self._classes])
        # Lengths differ, or requests that begin together would end together for ever.
        num_output = max(1, round(kind.output_tokens * self._random.uniform(0.5, 1.5)))
        prompt = (0,) * max(1, round(kind.prompt_tokens * self._random.uniform(0.5, 1.5)))
        return _RandomText(
            prompt, num_output, self._chances, kind.skill, self._correlation, self._random.getrandbits(48)
        )


class _RandomText:
    def __init__(
        self,
        prompt: tuple[int, ...],
        num_output: int,
        chances: Sequence[Sequence[float]],
        skill: float,
        correlation: float,
        seed: int,
    ) -> None:
        self.prompt_token_ids = prompt
        self.num_output = num_output
        self.num_cached_tokens = 0
        self._chances = chances
        self._skill = skill
        self._correlation = correlation
        self._random = random.Random(seed)
        # Per position: one draw per drafter, equal ones where they share it.
        self._draws: list[list[float]] = []
        self._shared: list[bool] = []

    def token(self, position: int) -> int:
        return position

    def propose(self, drafter: int, position: int, length: int, head: Proposal) -> Proposal:
        ids = list(head.token_ids)
        chances = self._chances[drafter]
        right = not ids or ids[-1] < _WRONG
        for depth in range(len(ids), length):
            at = position + depth
            shared, draw = self._at(at, drafter)
            right = right and draw < self._skill * chances[min(depth, len(chances) - 1)]
            ids.append(at if right else _WRONG + at * 64 + (0 if shared else drafter + 1))
        return Proposal(tuple(ids), (_CONFIDENCE,) * len(ids))

    def _at(self, position: int, drafter: int) -> tuple[bool, float]:
        draws, source = self._draws, self._random
        while len(draws) <= position:
            shared = source.random() < self._correlation
            common = source.random()
            draws.append([common if shared else source.random() for _ in self._chances])
            self._shared.append(shared)
        return self._shared[position], draws[position][drafter]
