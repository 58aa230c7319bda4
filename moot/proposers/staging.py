"""Cheaper drafters that a draft model is fed by (staged speculative decoding, arXiv 2308.04623).

A stage guesses what comes next; the draft model looks at the guess in one forward and goes along with it by its own
sample-and-match walk, as the target does with a draft. What comes out is what it would have drafted alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moot.core.errors import ConfigError
from moot.core.types import SamplingParams
from moot.proposers.base import Ask, Chain, PathAsk, Proposer
from moot.proposers.registry import REQUEST_KINDS, create, load_kind


def make_stage(text: str, vocab_size: int, fingerprint: str) -> Proposer[Any]:
    """What `kind[~option=value]...[+kind...]` names, the cheapest first.

    A kind that has stages itself is fed by all before it; of kinds without, the first that has something to say is
    heard. `fingerprint`: of the tokenizer that all of them must share. Raises ConfigError.
    """
    before, _, last = text.rpartition("+")
    kind, *pairs = last.split("~")
    if kind in REQUEST_KINDS:
        raise ConfigError(f"kind {kind} cannot be a stage: it lives from what a request brings")
    options: dict[str, object] = {"vocab_size": vocab_size}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"option stages: {last!r} is not kind[~option=value]...")
        options[name] = value
    takes_stages = any(field.name == "stages" for field in dataclasses.fields(load_kind(kind).options))
    if before and takes_stages:
        return create(kind, options | {"stages": before}, fingerprint)
    proposer = create(kind, options, fingerprint)
    return FirstOf(make_stage(before, vocab_size, fingerprint), proposer) if before else proposer


class FirstOf(Proposer[tuple[Any, Any]]):
    """What `first` says, or where it abstains, what `other` says."""

    kind = "first_of"

    def __init__(self, first: Proposer[Any], other: Proposer[Any]) -> None:
        self._both = (first, other)
        self.family = other.family
        self.context_limit = max(first.context_limit, other.context_limit)

    def open(self, prefix: Sequence[int], params: SamplingParams) -> tuple[Any, Any]:
        first, other = self._both
        return first.open(prefix, params), other.open(prefix, params)

    def extend(
        self, session: tuple[Any, Any], token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        for proposer, own in zip(self._both, session, strict=True):
            proposer.extend(own, token_ids, top_candidates)

    def propose(self, asks: Sequence[Ask[tuple[Any, Any]]]) -> list[list[Chain]]:
        answers = self._part(0).propose([dataclasses.replace(ask, session=ask.session[0]) for ask in asks])
        left = [index for index, chains in enumerate(answers) if not chains]
        others = self._part(1).propose(
            [dataclasses.replace(asks[index], session=asks[index].session[1]) for index in left]
        )
        for index, chains in zip(left, others, strict=True):
            answers[index] = chains
        return answers

    def after(self, asks: Sequence[PathAsk[tuple[Any, Any]]]) -> list[tuple[int, ...]]:
        answers = self._part(0).after([dataclasses.replace(ask, session=ask.session[0]) for ask in asks])
        left = [index for index, ids in enumerate(answers) if not ids]
        others = self._part(1).after(
            [dataclasses.replace(asks[index], session=asks[index].session[1]) for index in left]
        )
        for index, ids in zip(left, others, strict=True):
            answers[index] = ids
        return answers

    def warm(self, session: tuple[Any, Any]) -> bool:
        return any([proposer.warm(own) for proposer, own in zip(self._both, session, strict=True)])

    def close(self, session: tuple[Any, Any]) -> None:
        for proposer, own in zip(self._both, session, strict=True):
            proposer.close(own)

    def _part(self, index: int) -> Proposer[Any]:
        return self._both[index]
