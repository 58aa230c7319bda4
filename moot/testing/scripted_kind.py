"""A drafter kind without a model with scripted costs and hits, so that the real drafter around it can be measured."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.testing.scripted_text import ScriptedText

CONFIDENCE = 200


@dataclass(slots=True, eq=False)
class ScriptedKindSession:
    """`drafted`: ids after the prefix that have been paid for."""

    prefix: list[int]
    params: SamplingParams
    drafted: list[int] = field(default_factory=list)


class ScriptedKind(Drafter[ScriptedKindSession]):
    """A drafter kind that knows `text`, and at each position says its token with the chance `acceptance`, else another
    one.

    Whether a position is right is a function of `seed` and the position. As with a model, one step of `token_s` seconds
    makes one more token for every ask of a call, what was drafted and then committed is not drafted again, and what
    the commits contradict is forgotten.
    """

    kind = "scripted"
    is_stepwise = True

    def __init__(
        self,
        text: ScriptedText | None = None,
        *,
        token_s: float = 0.0,
        acceptance: float = 1.0,
        seed: int = 0,
        context_limit: int = 8192,
    ) -> None:
        self.text = text or ScriptedText()
        self.family = self.kind
        self.context_limit = context_limit
        self.num_steps = 0
        self._token_s = token_s
        self._acceptance = acceptance
        self._seed = seed

    def open(self, prefix: Sequence[int], params: SamplingParams) -> ScriptedKindSession:
        return ScriptedKindSession(list(prefix), params)

    def extend(
        self, session: ScriptedKindSession, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        count = min(len(session.drafted), len(token_ids))
        follows = session.drafted[:count] == list(token_ids[:count])
        session.drafted = session.drafted[count:] if follows else []
        session.prefix += token_ids

    def propose(self, asks: Sequence[Ask[ScriptedKindSession]]) -> list[list[Proposal]]:
        goals = [min(ask.num_speculative_tokens, self.context_limit - len(ask.session.prefix)) for ask in asks]
        while short := [ask.session for ask, goal in zip(asks, goals, strict=True) if len(ask.session.drafted) < goal]:
            time.sleep(self._token_s)
            self.num_steps += 1
            for session in short:
                session.drafted.append(self._next(session))
        heads = [tuple(ask.session.drafted[:goal]) for ask, goal in zip(asks, goals, strict=True)]
        return [[Proposal(ids, (CONFIDENCE,) * len(ids))] if ids else [] for ids in heads]

    def _next(self, session: ScriptedKindSession) -> int:
        position = len(session.prefix) + len(session.drafted)
        tail = (*session.prefix[-4:], *session.drafted)[-4:]
        # Past any min_tokens: where the prompt ends is not known here.
        token = self.text.token_at(position, tail, position, session.params)
        if random.Random(self._seed * 1_000_003 + position).random() < self._acceptance:
            return token
        return (token + 1) % self.text.vocab_size
