"""The base of kinds with a draft model: options, sessions that follow commits, limits, warming, and their noise.

`draws` names the noise with which a drafter that has a distribution draws its tokens at temperature > 0. Coupled: the
target's own noise, so that both draw the same token where their distributions agree (Daliri, Musco, Suresh, arXiv
2408.07978). The other two are there for comparison: independent noise is a draft sampled as usual, greedy takes the
likeliest token. A draft decides nothing, so the text is the same with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moot.core.history import History
from moot.core.noise import choice_seed
from moot.core.options import option, option_of
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Candidates, ConfidenceOptions, Drafter
from moot.drafters.neural.neural_sessions import Drafted, NeuralSession, SessionFeed
from moot.model.backend import choose_runner
from moot.model.compute import ComputeOptions, TorchOptions
from moot.model.loading.load import LoadedModel, load_model
from moot.model.sampling.sampler import Sampler
from moot.shipped import locate

COUPLED = "coupled"
INDEPENDENT = "independent"
GREEDY = "greedy"
DRAWS = (COUPLED, INDEPENDENT, GREEDY)

_NO_CHOICE = 1 << 32
"""No request has as many choices: no other choice has the seed of this one."""


def drafting_params(params: SamplingParams, draws: str) -> SamplingParams:
    """The parameters that a drafter draws with for a request with `params`; `draws`: one of DRAWS."""
    if draws == COUPLED or params.is_greedy:
        return params
    if draws == GREEDY:
        return replace(params, temperature=0.0)
    return replace(params, seed=choice_seed(params.seed, _NO_CHOICE))


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(ConfidenceOptions):
    vocab_size: int = option(0, help="size of the tokenizer's vocabulary; 0: the model's own tokenizer's", minimum=0)
    context_limit: int = option(
        0, help="prefix length in tokens past which the drafter abstains; 0: the model's limit", minimum=0
    )
    model: str = option(help="folder or hub id of a causal language model")
    revision: str | None = option(None, help="revision of a hub model")
    device: str = option_of(ComputeOptions, "device")
    dtype: str = option_of(ComputeOptions, "dtype", help="number format of the weights")
    num_threads: int | None = option_of(TorchOptions, "num_threads")
    kv_capacity_tokens: int = option(65_536, help="tokens of KV cache for all sessions together", minimum=1)
    batch_invariant: bool = option(False, help="proposals that do not depend on batch-mates, bit by bit (slower)")
    draws: str = option(
        COUPLED, help="noise of sampling at temperature > 0: the target's, other noise, or none", choices=DRAWS
    )
    prefill_chunk: int = option(256, help="most tokens of one session that are read in one forward pass", minimum=1)

    def load(self) -> LoadedModel:
        """The model that is named. Raises ModelRefused or ConfigError."""
        return load_model(locate(self.model), self.device, self.dtype, self.revision, num_threads=self.num_threads)


class DraftModelDrafter(Drafter[NeuralSession]):
    """Base of kinds with a draft model; a kind adds how it drafts: `propose`. `loaded`: what drafts; of its embeddings
    the first `num_ids` are ids'."""

    def __init__(self, options: DraftModelOptions, loaded: LoadedModel, num_ids: int) -> None:
        info = loaded.info
        self.family = options.family or self.kind
        self.vocab_size = min(options.vocab_size or info.vocab_size, info.vocab_size)
        self.context_limit = min(options.context_limit or info.context_limit, info.context_limit)
        self.tokenizer_fingerprint = info.tokenizer_fingerprint
        self.model_info = replace(info, vocab_size=self.vocab_size, context_limit=self.context_limit)
        self._num_embeddings = num_ids
        self._runner = choose_runner(loaded, options.kv_capacity_tokens, options.batch_invariant)
        self.device = self._runner.device.type
        self._feed = SessionFeed(self._runner, options.prefill_chunk)
        self._sampler = Sampler(self.vocab_size, info.end_token_ids)
        self._draws = options.draws

    @property
    def kv_used_tokens(self) -> int:
        return self._runner.pool.used_tokens

    def open(self, prefix: Sequence[int], params: SamplingParams) -> NeuralSession:
        # min_tokens and the penalties over the output need to know where the prompt ends, which no proposal is worth.
        drawn = drafting_params(params, self._draws)
        own = replace(drawn, min_tokens=0, presence_penalty=0.0, frequency_penalty=0.0)
        session = NeuralSession(own, self._runner.new_cache(), history=History(()) if own.has_penalties else None)
        self._feed.add(session)
        if prefix:
            session.commit(prefix)
        return session

    def extend(self, session: NeuralSession, token_ids: Sequence[int], top_candidates: Candidates = ()) -> None:
        if token_ids:
            session.commit(token_ids)

    def warm(self, session: NeuralSession) -> bool:
        """Prefill one chunk of all but the last token."""
        return self._is_usable(session) and bool(self._feed.prefill_chunks([session], [session]))

    def close(self, session: NeuralSession) -> None:
        self._feed.remove(session)

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


def as_chain(path: Sequence[Drafted]) -> Proposal:
    return Proposal(tuple(token for token, _ in path), tuple(confidence for _, confidence in path))
