"""The drafter `prompt_lookup` (Saxena 2023): what followed the last n tokens when they were seen before.

The longest n-gram from `max_ngram` down to `min_ngram` that occurred earlier wins; among its occurrences, the most
recent. A copy that reaches the end of the prefix goes on from what it has copied, so a loop yields K tokens.

There is no index: an ask searches the whole prefix, 4 bytes a token, which `context_limit` bounds.

Confidence byte: 32 * n - 1, n the length of the n-gram matched, at most 8; equal along the chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from moot.core.options import option
from moot.core.types import Proposal
from moot.drafters.interface import Candidates, DrafterOptions, ModelFreeDrafter, PrefixSession, require
from moot.drafters.lookup.matching import occurrences

MAX_NGRAM = 8


@dataclass(frozen=True, kw_only=True)
class PromptLookupOptions(DrafterOptions):
    max_ngram: int = option(4, help="longest n-gram looked up, in tokens", minimum=1, maximum=MAX_NGRAM)
    min_ngram: int = option(1, help="shortest n-gram looked up, in tokens", minimum=1)

    def check_together(self) -> None:
        require(self.min_ngram <= self.max_ngram, "max_ngram", "must not be below min_ngram")


@dataclass(slots=True)
class PromptLookupSession(PrefixSession):
    tokens: array[int] = field(default_factory=lambda: array("I"))


class PromptLookupDrafter(ModelFreeDrafter[PromptLookupSession]):
    kind = "prompt_lookup"
    new_session = PromptLookupSession

    def __init__(self, options: PromptLookupOptions) -> None:
        super().__init__(options)
        self._sizes = range(options.min_ngram, options.max_ngram + 1)

    def append(self, session: PromptLookupSession, token_ids: Sequence[int], top_candidates: Candidates) -> None:
        session.tokens.extend(token_ids)

    def chains(self, session: PromptLookupSession, num_tokens: int, width: int) -> Iterator[Proposal]:
        tokens = session.tokens
        followers = latest_followers(tokens, self._sizes.stop - 1)
        first_ids: set[int] = set()
        for size in range(len(followers), self._sizes.start - 1, -1):
            index = followers[size - 1]
            if tokens[index] not in first_ids:
                first_ids.add(tokens[index])
                yield Proposal(copy_from(tokens, index, num_tokens), (32 * size - 1,) * num_tokens)

    def ids_after(self, session: PromptLookupSession, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        tokens = session.tokens + array("I", path)
        followers = latest_followers(tokens, self._sizes.stop - 1)
        if len(followers) < self._sizes.start:
            return ()
        return copy_from(tokens, followers[-1], num_tokens)

    def close(self, session: PromptLookupSession) -> None:
        session.tokens = array("I")


def latest_followers(tokens: array[int], max_size: int) -> list[int]:
    """Entry n - 1: index of the token after the most recent earlier occurrence of the last n tokens.

    For n = 1, 2, ... as long as there is one, up to `max_size`.
    """
    earlier = np.frombuffer(tokens, dtype=np.uint32)[:-1]
    return [int(indices[-1]) for indices in occurrences(earlier, tokens[-max_size:])]


def copy_from(tokens: Sequence[int], index: int, num_tokens: int) -> tuple[int, ...]:
    """`num_tokens` ids read from `index` on, reading on in the copy itself past the end of `tokens`."""
    copied = list(tokens[index : index + num_tokens])
    period = len(tokens) - index
    while len(copied) < num_tokens:
        copied.append(copied[len(copied) - period])
    return tuple(copied)
