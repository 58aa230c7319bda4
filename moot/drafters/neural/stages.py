"""Stages: cheaper drafters that feed a draft model (staged speculative decoding, arXiv 2308.04623).

A stage guesses what comes next for each session, as far as there is room to look at the guess; the draft model looks at
it in one forward and goes along with it by its own sample-and-match walk, as the target does with a draft. What comes
out is what the draft model would have drafted alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Candidates, Drafter, PathAsk
from moot.drafters.neural.neural_sessions import NeuralSession
from moot.model.cache.contiguous import PAGE_SLOTS, KvPool


class GuessingStage:
    """`num_tokens`: ids guessed for one forward at most. `num_embeddings`: of the draft model; `pool`: its caches'."""

    def __init__(
        self, drafter: Drafter[Any], num_tokens: int, context_limit: int, num_embeddings: int, pool: KvPool
    ) -> None:
        self.drafter = drafter
        self.num_guessed = 0
        self._num_tokens = num_tokens
        self._context_limit = context_limit
        self._num_embeddings = num_embeddings
        self._pool = pool

    def guesses(self, sessions: Sequence[NeuralSession]) -> list[tuple[int, ...]]:
        """Guesses: for each session ids that may follow its path; often none."""
        asks: list[PathAsk[Any]] = []
        asking: list[int] = []
        free = self._pool.free_tokens
        for index, session in enumerate(sessions):
            length = len(session.tokens) + len(session.ahead)
            room = min(self._num_tokens, self._context_limit - length - 1)
            slack = session.cache.num_slots - session.cache.length - 1
            if slack < room and free >= PAGE_SLOTS:
                free -= PAGE_SLOTS
            else:
                # A guess must not cost any session its cache: with it, proposals would be others than without.
                room = min(room, slack)
            if room > 0:
                asking.append(index)
                asks.append(PathAsk(session.stage, session.path(len(session.tokens) - session.num_tentative), room))
        found: list[tuple[int, ...]] = [()] * len(sessions)
        for index, ask, ids in zip(asking, asks, self.drafter.after(asks), strict=True):
            bad = next((i for i, token in enumerate(ids) if not 0 <= token < self._num_embeddings), len(ids))
            found[index] = ids[: min(bad, ask.num_tokens)]
            self.num_guessed += len(found[index])
        return found


class FirstOf(Drafter[tuple[Any, Any]]):
    """Two stages as one: the guess of `first`, or where it abstains, that of `other`."""

    kind = "first_of"

    def __init__(self, first: Drafter[Any], other: Drafter[Any]) -> None:
        self._both = (first, other)
        self.family = other.family
        self.context_limit = max(first.context_limit, other.context_limit)

    def open(self, prefix: Sequence[int], params: SamplingParams) -> tuple[Any, Any]:
        first, other = self._both
        return first.open(prefix, params), other.open(prefix, params)

    def extend(self, session: tuple[Any, Any], token_ids: Sequence[int], top_candidates: Candidates = ()) -> None:
        for drafter, own in zip(self._both, session, strict=True):
            drafter.extend(own, token_ids, top_candidates)

    def propose(self, asks: Sequence[Ask[tuple[Any, Any]]]) -> list[list[Proposal]]:
        first, other = self._both
        return _first_said(first.propose, other.propose, asks)

    def after(self, asks: Sequence[PathAsk[tuple[Any, Any]]]) -> list[tuple[int, ...]]:
        first, other = self._both
        return _first_said(first.after, other.after, asks)

    def warm(self, session: tuple[Any, Any]) -> bool:
        return any([drafter.warm(own) for drafter, own in zip(self._both, session, strict=True)])

    def close(self, session: tuple[Any, Any]) -> None:
        for drafter, own in zip(self._both, session, strict=True):
            drafter.close(own)


def _first_said(first: Callable[..., list[Any]], other: Callable[..., list[Any]], asks: Sequence[Any]) -> list[Any]:
    """For each ask the answer of `first`, or where that is empty, of `other`."""
    answers = first([replace(ask, session=ask.session[0]) for ask in asks])
    left = [index for index, answer in enumerate(answers) if not answer]
    others = other([replace(asks[index], session=asks[index].session[1]) for index in left])
    for index, answer in zip(left, others, strict=True):
        answers[index] = answer
    return answers
