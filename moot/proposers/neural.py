"""A draft model: any causal language model with the target's tokenizer.

All asks share one ragged forward per drafted token. A session's KV cache holds a beginning of prefix + drafted path;
committed ids that leave the path crop it to their longest common prefix, so only what is new is computed. What was
drafted and then committed by others is not drafted again: asking a second time for more tokens goes on where the
first ended. At temperature > 0 tokens are drawn with the target's noise.

Confidence byte: round(255 * p), p the probability of the token in the draft model's own softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moot.config import option
from moot.core.history import History
from moot.core.types import SamplingParams
from moot.model.backend import choose_runner
from moot.model.load import load_model
from moot.model.placement import DTYPES
from moot.model.sampler import Sampler
from moot.proposers.base import Ask, Chain, PathAsk, Proposer
from moot.proposers.draws import COUPLED, DRAWS, drafting_params
from moot.proposers.neural_drafting import NeuralDrafting, num_likely
from moot.proposers.neural_feed import SessionFeed
from moot.proposers.neural_session import Drafted, NeuralSession
from moot.proposers.neural_stage import GuessingStage
from moot.proposers.options import ProposerOptions, require
from moot.proposers.staging import make_stage
from moot.shipped import locate


@dataclass(frozen=True, kw_only=True)
class NeuralOptions(ProposerOptions):
    vocab_size: int = option(0, help="size of the tokenizer's vocabulary; 0: the model's own tokenizer's")
    context_limit: int = option(0, help="prefix length past which the drafter abstains; 0: the model's limit")
    model: str = option(help="folder or hub id of a causal language model")
    revision: str | None = option(None, help="revision of a hub model")
    device: str = option("auto", help="where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", help="number format of the weights", choices=("auto", *DTYPES))
    num_threads: int | None = option(None, help="torch threads; none: torch's default")
    kv_capacity_tokens: int = option(65_536, help="tokens of KV cache for all sessions together")
    deterministic: bool = option(False, help="proposals that do not depend on batch-mates, bit by bit (slower)")
    min_confidence: float = option(0.0, help="a chain ends before a token less probable than this")
    min_chain_confidence: float = option(
        0.0, help="a proposal ends before the token with which it gets, as a whole, less probable than this"
    )
    sharpen: float = option(1.0, help="multiplies the logits at temperature > 0; above 1 helps weak models")
    draws: str = option(COUPLED, help="at temperature > 0: the target's noise, other noise, or none", choices=DRAWS)
    prefill_chunk: int = option(256, help="tokens of one session fed in one forward")
    stages: str = option(
        "", help="cheaper drafters that guess what this one then looks at: kind[~option=value]...[+kind...]"
    )
    stage_tokens: int = option(8, help="tokens guessed for one forward at most")

    def __post_init__(self) -> None:
        require(self.vocab_size >= 0, "vocab_size", "must not be negative")
        require(self.context_limit >= 0, "context_limit", "must not be negative")
        require(self.kv_capacity_tokens > 0, "kv_capacity_tokens", "must be positive")
        require(0.0 <= self.min_confidence <= 1.0, "min_confidence", "must be in 0..1")
        require(0.0 <= self.min_chain_confidence <= 1.0, "min_chain_confidence", "must be in 0..1")
        require(self.sharpen > 0.0, "sharpen", "must be positive")
        require(self.prefill_chunk > 0, "prefill_chunk", "must be positive")
        require(self.stage_tokens > 0, "stage_tokens", "must be positive")


class NeuralProposer(Proposer[NeuralSession]):
    kind = "neural"
    is_stepwise = True

    def __init__(self, options: NeuralOptions) -> None:
        loaded = load_model(
            locate(options.model), options.device, options.dtype, options.revision, num_threads=options.num_threads
        )
        info = loaded.info
        self.family = options.family or self.kind
        self.vocab_size = min(options.vocab_size or info.vocab_size, info.vocab_size)
        self.context_limit = min(options.context_limit or info.context_limit, info.context_limit)
        self.tokenizer_fingerprint = info.tokenizer_fingerprint
        self.model_info = replace(info, vocab_size=self.vocab_size, context_limit=self.context_limit)
        self._num_embeddings = loaded.num_embeddings
        self._runner = choose_runner(loaded, options.kv_capacity_tokens, options.deterministic)
        self.device = self._runner.device.type
        self._feed = SessionFeed(self._runner, options.prefill_chunk)
        sampler = Sampler(self.vocab_size, info.end_token_ids)
        self._stage: GuessingStage | None = None
        if options.stages:
            stage = make_stage(options.stages, self.vocab_size, self.tokenizer_fingerprint)
            self._stage = GuessingStage(
                stage, options.stage_tokens, self.context_limit, self._num_embeddings, self._runner.pool
            )
        self._least = options.min_chain_confidence
        self._draws = options.draws
        self._drafting = NeuralDrafting(
            self._feed, sampler, options.min_confidence, options.sharpen, self._stage, self._least
        )

    @property
    def kv_used_tokens(self) -> int:
        return self._runner.pool.used_tokens

    @property
    def stage_counts(self) -> tuple[int, int]:
        """Ids that the stages guessed, and those of them that became part of a proposal or of the path behind it."""
        return (self._stage.num_guessed if self._stage else 0), self._drafting.num_gone_along

    def open(self, prefix: Sequence[int], params: SamplingParams) -> NeuralSession:
        # min_tokens and the penalties over the output need to know where the prompt ends, which no proposal is worth.
        drawn = drafting_params(params, self._draws)
        own = replace(drawn, min_tokens=0, presence_penalty=0.0, frequency_penalty=0.0)
        session = NeuralSession(own, self._runner.new_cache())
        session.history = History(()) if own.has_penalties else None
        self._feed.add(session)
        if prefix:
            session.commit(prefix)
        if self._stage is not None:
            session.stage = self._stage.proposer.open(prefix, params)
        return session

    def extend(
        self, session: NeuralSession, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        if token_ids:
            session.commit(token_ids)
            if self._stage is not None:
                self._stage.proposer.extend(session.stage, token_ids, top_candidates)

    def propose(self, asks: Sequence[Ask[NeuralSession]]) -> list[list[Chain]]:
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
        answers: list[list[Chain]] = []
        for ask, length in zip(asks, lengths, strict=True):
            paths = branches[id(ask.session)] if length and ask.width > 1 else [ask.session.ahead[:length]]
            likely = [path[: num_likely(path, self._least)] for path in paths]
            answers.append([_chain(path) for path in likely if path])
        return answers

    def after(self, asks: Sequence[PathAsk[NeuralSession]]) -> list[tuple[int, ...]]:
        """What is drafted after a path that was asked for before goes on where that ended."""
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
        """Prefill one chunk of all but the last token; then let the stage do the like."""
        if self._is_usable(session) and self._feed.prefill_chunks([session], [session]):
            return True
        return self._stage is not None and self._stage.proposer.warm(session.stage)

    def close(self, session: NeuralSession) -> None:
        self._feed.remove(session)
        if self._stage is not None:
            self._stage.proposer.close(session.stage)

    def _is_usable(self, session: NeuralSession) -> bool:
        return 0 < len(session.tokens) < self.context_limit and session.highest_id < self._num_embeddings

    def _room(self, ask: Ask[NeuralSession]) -> int:
        """Tokens to draft; 0: abstain."""
        if ask.width < 1 or ask.num_speculative_tokens < 1 or not self._is_usable(ask.session):
            return 0
        if ask.is_ahead and ask.session.num_missing > 0:
            # Its cache has made room for others: what is read again is for an ask.
            return len(ask.session.ahead)
        return min(ask.num_speculative_tokens, self.context_limit - len(ask.session.tokens))


def _chain(path: Sequence[Drafted]) -> Chain:
    return Chain(tuple(token for token, _ in path), tuple(confidence for _, confidence in path))
