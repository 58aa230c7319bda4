"""Drafter kinds that no package has: one that knows what the target will say, and some that behave very badly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from tests.paths.path_drawing import VOCAB_SIZE

Known = dict[int, tuple[int, tuple[int, ...]]]
"""Seed of a choice, which is its own, to the length of its prompt and the output that plain decoding gave it."""


@dataclass(slots=True, eq=False)
class Told:
    prefix: list[int]
    params: SamplingParams


class _Told(Drafter[Told]):
    family = ""
    context_limit = 100_000

    def open(self, prefix: Sequence[int], params: SamplingParams) -> Told:
        return Told(list(prefix), params)

    def extend(self, session: Told, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()) -> None:
        session.prefix += token_ids

    def propose(self, asks: Sequence[Ask[Told]]) -> list[list[Proposal]]:
        return [self.chains(ask, random.Random(f"{ask.session.params.seed} {len(ask.session.prefix)}")) for ask in asks]

    def chains(self, ask: Ask[Told], draw: random.Random) -> list[Proposal]:
        raise NotImplementedError


class Knowing(_Told):
    """The true text and more behind its end, spoilt at a drawn place; with some width, wrong branches before and beside
    the true one, which leave it at every depth."""

    kind = "knowing"

    def __init__(self, known: Known) -> None:
        self._known = known

    def chains(self, ask: Ask[Told], draw: random.Random) -> list[Proposal]:
        found = self._known.get(ask.session.params.seed)
        if found is None:
            return []
        prompt_length, output = found
        done = len(ask.session.prefix) - prompt_length
        true = [*output[done:], *_ids(draw, 12)][: ask.num_speculative_tokens]
        if draw.random() < 0.6:
            true[draw.randrange(len(true)) :] = _ids(draw, 3)
        paths = [true[: ask.num_speculative_tokens]]
        while len(paths) < ask.width and draw.random() < 0.8:
            place = draw.randrange(len(true))
            wrong = [*true[:place], *_ids(draw, 1), *true[place + 1 :]]
            paths.insert(draw.randint(0, len(paths)), wrong[: ask.num_speculative_tokens])
        return [Proposal(tuple(path), tuple(draw.randrange(256) for _ in path)) for path in paths]


class Wild(_Told):
    """`manner`: one of path_drawing.WILD but `protocol`."""

    def __init__(self, manner: str) -> None:
        self.kind = self._manner = manner  # type: ignore[misc]  # an instance's own kind

    def chains(self, ask: Ask[Told], draw: random.Random) -> list[Proposal]:
        count = ask.num_speculative_tokens
        ids, sure = _ids(draw, count), (255,) * count
        good = Proposal(ids, sure)
        if self._manner == "empty":
            return draw.choice(([], [Proposal((), ())], [Proposal((), ()), good]))
        if self._manner == "outside":
            bad = draw.choice((VOCAB_SIZE, 299, 300, 2**21, 2**32 - 1))
            place = draw.randrange(count)
            return [Proposal((*ids[:place], bad, *ids[place + 1 :]), sure)]
        if self._manner == "too_long":
            more = draw.choice((1, 70, 600))
            return [Proposal(_ids(draw, count + more), (255,) * (count + more))]
        if self._manner == "too_many":
            return [Proposal(_ids(draw, count), sure) for _ in range(ask.width + draw.randint(1, 9))]
        if self._manner == "confidences":
            return [Proposal(ids, draw.choice(((), sure[:-1], (*sure, 1))))]
        if self._manner == "failing" and draw.random() < 0.3:
            raise RuntimeError("this drafter fails on purpose")
        return [Proposal(_ids(draw, count), sure) for _ in range(ask.width)]


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCAB_SIZE) for _ in range(count))
