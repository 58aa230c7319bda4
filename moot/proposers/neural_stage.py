"""The cheaper stage of a draft model: what it guesses for each session, as far as there is room to look at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moot.model.kv import PAGE_SLOTS, KvPool
from moot.proposers.base import PathAsk, Proposer
from moot.proposers.neural_session import NeuralSession


class GuessingStage:
    """`num_tokens`: ids guessed for one forward at most. `num_embeddings`: of the draft model; `pool`: its caches'."""

    def __init__(
        self, proposer: Proposer[Any], num_tokens: int, context_limit: int, num_embeddings: int, pool: KvPool
    ) -> None:
        self.proposer = proposer
        self.num_guessed = 0
        self._num_tokens = num_tokens
        self._context_limit = context_limit
        self._num_embeddings = num_embeddings
        self._pool = pool

    def guesses(self, sessions: Sequence[NeuralSession]) -> list[tuple[int, ...]]:
        """For each session ids that may follow its path; often none."""
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
        for index, ask, ids in zip(asking, asks, self.proposer.after(asks), strict=True):
            bad = next((i for i, token in enumerate(ids) if not 0 <= token < self._num_embeddings), len(ids))
            found[index] = ids[: min(bad, ask.num_tokens)]
            self.num_guessed += len(found[index])
        return found
