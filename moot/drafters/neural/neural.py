"""The drafter `neural`: a draft model, which is any causal language model with the target's tokenizer.

All asks share one ragged forward per drafted token. A session's KV cache holds a beginning of prefix + drafted path;
committed ids that leave the path crop it to their longest common prefix, so only what is new is computed. What was
drafted and then committed, on whichever drafter's proposal, is not drafted again: asking a second time for more tokens
goes on where the first ended. At temperature > 0 tokens are drawn with the target's noise.

Confidence byte: round(255 * p), p the probability of the token in the draft model's own softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moot.core.options import option
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Candidates, Drafter, PathAsk
from moot.drafters.neural.draft_model import DraftModelDrafter, DraftModelOptions, as_chain
from moot.drafters.neural.neural_sessions import NeuralSession
from moot.drafters.neural.stages import GuessingStage
from moot.drafters.neural.stepwise import NeuralDrafting, num_likely


@dataclass(frozen=True, kw_only=True)
class NeuralOptions(DraftModelOptions):
    min_chain_confidence: float = option(
        0.0,
        help="a proposal ends before the token with which its probability as a whole falls below this",
        minimum=0,
        maximum=1,
    )
    stages: str = option(
        "", help="cheaper drafters whose guesses the draft model checks: kind[~option=value]...[+kind...]"
    )
    stage_tokens: int = option(8, help="most tokens guessed for one forward pass", minimum=1)


class NeuralDrafter(DraftModelDrafter):
    kind = "neural"
    is_stepwise = True

    def __init__(self, options: NeuralOptions, make_stage: Callable[[str, int, str], Drafter[Any]]) -> None:
        """`make_stage(stages, vocab_size, tokenizer fingerprint)`: the registry's."""
        loaded = options.load()
        super().__init__(options, loaded, loaded.num_embeddings)
        self._stage: GuessingStage | None = None
        if options.stages:
            stage = make_stage(options.stages, self.vocab_size, self.tokenizer_fingerprint)
            self._stage = GuessingStage(
                stage, options.stage_tokens, self.context_limit, self._num_embeddings, self._runner.pool
            )
        self._least = options.min_chain_confidence
        self._drafting = NeuralDrafting(
            self._feed, self._sampler, options.min_confidence, options.sharpen, self._stage, self._least
        )

    @property
    def stage_counts(self) -> tuple[int, int]:
        """Ids that the stages guessed, and those of them that became part of a proposal or of the path behind it."""
        return (self._stage.num_guessed if self._stage else 0), self._drafting.num_gone_along

    def open(self, prefix: Sequence[int], params: SamplingParams) -> NeuralSession:
        session = super().open(prefix, params)
        if self._stage is not None:
            session.stage = self._stage.drafter.open(prefix, params)
        return session

    def extend(self, session: NeuralSession, token_ids: Sequence[int], top_candidates: Candidates = ()) -> None:
        super().extend(session, token_ids, top_candidates)
        if token_ids and self._stage is not None:
            self._stage.drafter.extend(session.stage, token_ids, top_candidates)

    def propose(self, asks: Sequence[Ask[NeuralSession]]) -> list[list[Proposal]]:
        lengths = [self._room(ask) for ask in asks]
        for ask in asks:
            if not ask.is_ahead:
                self._feed.use(ask.session)
        chains = [(ask, n) for ask, n in zip(asks, lengths, strict=True) if ask.width == 1 and n]
        self._drafting.chains(
            [(ask.session, n) for ask, n in chains], {id(ask.session) for ask, _ in chains if ask.is_ahead}
        )
        branches = self._drafting.branches(
            [(ask.session, n, ask.width) for ask, n in zip(asks, lengths, strict=True) if ask.width > 1 and n]
        )
        answers: list[list[Proposal]] = []
        for ask, length in zip(asks, lengths, strict=True):
            paths = branches[id(ask.session)] if length and ask.width > 1 else [ask.session.ahead[:length]]
            likely = [path[: num_likely(path, self._least)] for path in paths]
            answers.append([as_chain(path) for path in likely if path])
        return answers

    def after(self, asks: Sequence[PathAsk[NeuralSession]]) -> list[tuple[int, ...]]:
        """Ids after a path; after one that was asked for before, drafting goes on where that ended."""
        answers: list[tuple[int, ...]] = [()] * len(asks)
        known = [index for index, ask in enumerate(asks) if max(ask.path, default=0) < self._num_embeddings]
        for index in known:
            asks[index].session.suppose(asks[index].path)
        found = self.propose([Ask(asks[index].session, asks[index].num_tokens) for index in known])
        for index, chains in zip(known, found, strict=True):
            asks[index].session.take_back()
            answers[index] = chains[0].token_ids if chains else ()
        return answers

    def warm(self, session: NeuralSession) -> bool:
        """Warm as every draft model does; then let the stage do the like."""
        if super().warm(session):
            return True
        return self._stage is not None and self._stage.drafter.warm(session.stage)

    def close(self, session: NeuralSession) -> None:
        super().close(session)
        if self._stage is not None:
            self._stage.drafter.close(session.stage)
