"""The interface of every drafter kind.

A proposer serves many sessions. For each it is told the prefix (prompt plus committed ids) and, when asked, returns
up to `width` chains of up to K ids that may come next, or abstains. Whatever it returns, the text stays the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from moot.core.types import ModelInfo, SamplingParams

if TYPE_CHECKING:
    from moot.proposers.siblings import Siblings


@dataclass(frozen=True, slots=True)
class Chain:
    """Proposed ids and one confidence byte (0 to 255) for each, on the proposer's own scale."""

    token_ids: tuple[int, ...]
    confidences: tuple[int, ...]


SessionT = TypeVar("SessionT")


@dataclass(frozen=True, slots=True)
class Ask(Generic[SessionT]):
    """One request for proposals: at most `width` chains of at most `num_speculative_tokens` ids."""

    session: SessionT
    num_speculative_tokens: int
    width: int = 1
    is_ahead: bool = False
    """Nobody waits for it: it takes no room that another session holds, and gets nothing where there is none."""


@dataclass(frozen=True, slots=True)
class PathAsk(Generic[SessionT]):
    """What a drafter asks of its cheaper stage: ids that may follow the prefix and `path`, which is not committed."""

    session: SessionT
    path: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Material:
    """What a request brings beside its prefix. Only drafters inside the router's process are told of it."""

    prompt_length: int = 0
    """The prefix's ids after so many are output."""
    prediction_token_ids: tuple[int, ...] = ()
    """The likely answer, as the client sent it."""
    siblings: Siblings | None = None
    """What all choices of one prompt share; None where there is but one."""
    choice_index: int = 0
    """Which of them this one is."""


NO_MATERIAL = Material()


class Proposer(ABC, Generic[SessionT]):
    """One drafter kind with its model or tables. Not thread-safe: the drafter's engine calls it from one thread."""

    kind: ClassVar[str]
    family: str
    """Drafters of one family are alike; the vote counts the strongest of them."""
    context_limit: int
    """Prefix length past which it abstains."""
    model_info: ModelInfo | None = None
    """Of kinds with a model: what it is."""
    tokenizer_fingerprint: str = ""
    """Of the tokenizer whose ids its model or tables hold; empty: any, or not known."""
    device: str = "cpu"
    """Where it computes, in torch's words."""
    is_stepwise: ClassVar[bool] = False
    """A chain costs one step per token, shared by all asks of a call, and asking for a longer one after the same prefix
    goes on where the shorter one ended. The engine then takes one step at a time, and drafts ahead."""
    shares_sessions: bool = False
    """What it proposes in a session depends on sessions before it, and not on the prefix alone."""

    @abstractmethod
    def open(self, prefix: Sequence[int], params: SamplingParams) -> SessionT:
        """Start a session whose prefix is `prefix`. `params.seed` is the seed of the target's noise."""

    def open_request(self, prefix: Sequence[int], params: SamplingParams, material: Material) -> SessionT:
        """`open`, for the kinds that live from what a request brings."""
        return self.open(prefix, params)

    def serves(self, material: Material) -> bool:
        """Whether it has a vote in a request that brings this."""
        return True

    @abstractmethod
    def extend(self, session: SessionT, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()) -> None:
        """Append committed ids. `top_candidates`: per id, the target's most likely ids there, or empty."""

    @abstractmethod
    def propose(self, asks: Sequence[Ask[SessionT]]) -> list[list[Chain]]:
        """For each ask its chains, best first; an empty list abstains. A failure in one ask must not harm others."""

    def after(self, asks: Sequence[PathAsk[SessionT]]) -> list[tuple[int, ...]]:
        """For each ask at most `num_tokens` ids after prefix and path; none abstains. Sessions stay as they are."""
        return [self.ids_after(ask.session, ask.path, ask.num_tokens) for ask in asks]

    def ids_after(self, session: SessionT, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """One such answer: here, the rest of its own proposal, where that begins with `path`."""
        chains = self.propose([Ask(session, len(path) + num_tokens)])[0]
        ids = chains[0].token_ids if chains else ()
        return ids[len(path) :] if ids[: len(path)] == tuple(path) else ()

    def warm(self, session: SessionT) -> bool:
        """Called while idle after open: do ahead of time some of what the first proposal would have to do.

        Commands wait meanwhile, so it does one bounded piece; True: there is more, call again when idle.
        """
        return False

    def close(self, session: SessionT) -> None:
        """Free what the session holds."""
