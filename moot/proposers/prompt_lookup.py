"""Prompt lookup decoding (Saxena 2023): what followed the last n tokens when they were seen before.

The longest n-gram from `max_ngram` down to `min_ngram` that occurred earlier wins; among its occurrences, the most
recent. A copy that reaches the end of the prefix goes on from what it has copied, so a loop yields K tokens.

Confidence byte: 32 * n - 1, n the length of the n-gram matched, at most 8; equal along the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moot.config import option
from moot.proposers.base import Chain
from moot.proposers.model_free import ModelFreeProposer, PrefixSession
from moot.proposers.options import ProposerOptions, require

MAX_NGRAM = 8


@dataclass(frozen=True, kw_only=True)
class PromptLookupOptions(ProposerOptions):
    max_ngram: int = option(4, help="longest n-gram looked up, in tokens")
    min_ngram: int = option(1, help="shortest n-gram looked up, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.min_ngram <= self.max_ngram <= MAX_NGRAM, "max_ngram", f"must be min_ngram..{MAX_NGRAM}")


@dataclass(slots=True)
class PromptLookupSession(PrefixSession):
    tokens: list[int] = field(default_factory=list)
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram to the index of the token after its most recent occurrence that has one."""


class PromptLookupProposer(ModelFreeProposer[PromptLookupSession]):
    kind = "prompt_lookup"

    def __init__(self, options: PromptLookupOptions) -> None:
        super().__init__(options)
        self._sizes = range(options.min_ngram, options.max_ngram + 1)

    def new_session(self) -> PromptLookupSession:
        return PromptLookupSession()

    def append(
        self, session: PromptLookupSession, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]]
    ) -> None:
        tokens, followers = session.tokens, session.followers
        start = len(tokens)
        tokens.extend(token_ids)
        for index in range(start, len(tokens)):
            for size in self._sizes:
                if size > index:
                    break
                followers[tuple(tokens[index - size : index])] = index

    def chains(self, session: PromptLookupSession, num_tokens: int, width: int) -> Iterator[Chain]:
        tokens = session.tokens
        first_ids: set[int] = set()
        for size in reversed(self._sizes):
            index = session.followers.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if index is not None and tokens[index] not in first_ids:
                first_ids.add(tokens[index])
                yield Chain(copy_from(tokens, index, num_tokens), (32 * size - 1,) * num_tokens)

    def close(self, session: PromptLookupSession) -> None:
        session.tokens, session.followers = [], {}


def copy_from(tokens: Sequence[int], index: int, num_tokens: int) -> tuple[int, ...]:
    """`num_tokens` ids read from `index` on, reading on in the copy itself past the end of `tokens`."""
    copied = list(tokens[index : index + num_tokens])
    period = len(tokens) - index
    while len(copied) < num_tokens:
        copied.append(copied[len(copied) - period])
    return tuple(copied)
