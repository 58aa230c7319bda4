"""What the kinds without a model share: sessions that follow a prefix, limits, and the check of what they emit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moot.core.types import SamplingParams
from moot.proposers.base import Ask, Chain, Proposer
from moot.proposers.options import ProposerOptions


@dataclass(slots=True)
class PrefixSession:
    """`length`: tokens of the prefix, also of the part that is no longer held."""

    length: int = 0


SessionT = TypeVar("SessionT", bound=PrefixSession)


class ModelFreeProposer(Proposer[SessionT], Generic[SessionT]):
    """A kind defines three methods on its session: make an empty one, append ids, and the chains for one ask.

    Past `context_limit` a session drops all that it holds and abstains for good, so its memory is bounded.
    """

    def __init__(self, options: ProposerOptions) -> None:
        self.family = options.family or self.kind
        self.context_limit = options.context_limit
        self.vocab_size = options.vocab_size

    @abstractmethod
    def new_session(self) -> SessionT:
        """A session with an empty prefix."""

    @abstractmethod
    def append(self, session: SessionT, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]]) -> None:
        """Add committed ids to what is held; `session.length` already counts them."""

    @abstractmethod
    def chains(self, session: SessionT, num_tokens: int, width: int) -> Iterable[Chain]:
        """Chains of at most `num_tokens` >= 1 ids, best first; more than `width` >= 1 are cut off."""

    def open(self, prefix: Sequence[int], params: SamplingParams) -> SessionT:
        session = self.new_session()
        self.extend(session, prefix)
        return session

    def extend(self, session: SessionT, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()) -> None:
        session.length += len(token_ids)
        if session.length <= self.context_limit:
            self.append(session, token_ids, top_candidates)
        else:
            self.close(session)

    def propose(self, asks: Sequence[Ask[SessionT]]) -> list[list[Chain]]:
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask[SessionT]) -> list[Chain]:
        room = self.context_limit - ask.session.length
        num_tokens = min(ask.num_speculative_tokens, room)
        if num_tokens < 1 or ask.width < 1 or ask.session.length == 0:
            return []
        return valid_chains(self.chains(ask.session, num_tokens, ask.width), self.vocab_size, num_tokens, ask.width)


def valid_chains(chains: Iterable[Chain], vocab_size: int, num_tokens: int, width: int) -> list[Chain]:
    """Each chain up to its first id outside 0..vocab_size-1 and to `num_tokens`; no empty one, no doubles."""
    valid: dict[tuple[int, ...], Chain] = {}
    for chain in chains:
        ids = chain.token_ids[:num_tokens]
        bad = next((index for index, token in enumerate(ids) if not 0 <= token < vocab_size), len(ids))
        if bad and ids[:bad] not in valid:
            valid[ids[:bad]] = Chain(ids[:bad], chain.confidences[:bad])
        if len(valid) == width:
            break
    return list(valid.values())


def window_start(length: int, window: int) -> int:
    """Where the indexed part of a prefix of `length` tokens begins: its last window / 2 to `window` tokens are in it.

    A function of the length alone, so that however a prefix arrived, the same part is indexed. It moves by half a
    window at a time: indexing anew costs a constant per token.
    """
    half = window // 2
    return 0 if length <= window else -(-(length - window) // half) * half
