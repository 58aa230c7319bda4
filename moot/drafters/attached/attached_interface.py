"""The interface of drafters that are attached to the verifier.

An attached drafter sees what no other drafter does: the target's hidden state behind the last committed token. It is
asked once a step, for all the step's sessions at once, on the thread that computes, and what it proposes goes out with
the answer. Like every proposal it may be anything: no token of the text depends on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moot.core.history import History
from moot.core.options import option
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import ConfidenceOptions
from moot.model.cache.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Guesses:
    """Tokens to be fed in a session's next step beside its draft, as a forest over the prefix: the parent of each is an
    earlier one, or ROOT. Siblings may be equal; none of them is ever accepted."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


NO_GUESSES = Guesses()


@dataclass(frozen=True, slots=True)
class AttachedAsk:
    """One session that a step has brought forward: at most `width` chains of at most `num_tokens` ids after
    `token_ids`, prompt plus output, of which the last one is new.

    `history`: of the same ids. `state` [width of the target]: what the target's output layer was given when it chose
    the last id. `session`: unique among those that have not ended. `answers`: the target's likeliest id after each of
    the drafter's guesses that this step has fed, None where it has none; empty where nothing was fed.
    """

    token_ids: Sequence[int]
    params: SamplingParams
    history: History
    state: Tensor
    num_tokens: int
    width: int = 1
    session: int = 0
    answers: tuple[int | None, ...] = ()
    cache: KvCache | None = None
    """The session's, with all but the last id: to be left as it was found, but for what slots after it hold."""


@dataclass(frozen=True, kw_only=True)
class ChainOptions(ConfidenceOptions):
    """Options of the kinds that propose one chain after every step."""

    max_tokens: int = option(4, help="most tokens of a chain", minimum=1)


class AttachedDrafter(ABC):
    """One drafter attached to the verifier. Not thread-safe: the compute thread calls it."""

    kind: ClassVar[str]
    needs_rounds: ClassVar[bool] = False
    """What it proposes depends on the rounds before, and not on text and state alone: no recording can show it."""
    drafter_id: str
    family: str
    """Drafters of one family are alike; the vote counts the strongest of them."""

    @abstractmethod
    def propose(self, asks: Sequence[AttachedAsk]) -> list[list[Proposal]]:
        """Chains per ask, best first; none: the drafter abstains. One pass for all asks. Whatever it raises ends the
        drafter."""

    def guess(self, session: int, token_ids: Sequence[int], num_rows: int, depth: int) -> Guesses:
        """Guesses to feed beside the draft that is verified after `token_ids`: at most `num_rows` tokens, at most
        `depth` of them on one path. Their answers come with the next ask of the session, unless the step had to do
        without."""
        return NO_GUESSES

    def end(self, session: int) -> None:  # noqa: B027 - most keep nothing of a session
        """Forget what is kept of a session, whether it is known here or not."""
