"""The ports of a round: drafters to ask, a target to decide. No transport here.

A `RequestDrafter` and a `Target` belong to one request. They read its `Prefix`, which only ever grows: a peer that must
be told the whole text again (a replica after a loss, a verifier after a move) is told it from there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moot.core.types import Draft, Proposal, SamplingParams, Verification
from moot.drafters.interface import NO_REQUEST_CONTEXT, RequestContext


@dataclass(slots=True)
class AttachedState:
    """One request's attached drafters, kept on its prefix: an opening or a verify tells the verifier what is wished."""

    drafter_ids: tuple[str, ...]
    width: int
    num_tokens: int
    """Wished for the round after the next answer; 0: none."""
    base_length: int = -1
    """What the proposals below follow."""
    proposals: tuple[Proposal, ...] = field(default=())

    def hear(self, verification: Verification) -> None:
        self.base_length = verification.base_length + len(verification.output_token_ids)
        self.proposals = verification.proposals


@dataclass(slots=True)
class Prefix:
    """Prompt and committed output of one request, with what identifies the request to its peers."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    """The very list that the request's Generation appends to."""
    top_candidates: list[tuple[int, ...]] = field(default_factory=list)
    """Per output token the target's most likely ids there; an empty row where the ids are not known."""
    cache_salt: str = ""
    traceparent: str = ""
    """Where its trace goes on; empty: it is not traced."""
    heard_at: float = 0.0
    """When the message was read that the request went on from last (the loop's time); 0: none yet."""
    request_context: RequestContext = NO_REQUEST_CONTEXT
    """What the request brings beside, for drafters in this process."""
    attached: AttachedState | None = None
    """Where drafters attached to the verifier have a vote: what is wished of them, and what came."""

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def since(self, length: int) -> list[int]:
        """The ids after the first `length` of prompt and output; `length` lies at or after the end of the prompt."""
        return self.output_token_ids[length - len(self.prompt_token_ids) :]

    def candidates_since(self, length: int) -> list[tuple[int, ...]]:
        """The rows that belong to `since(length)`; empty unless every one of them is known."""
        rows = self.top_candidates[length - len(self.prompt_token_ids) :]
        return rows if rows and all(rows) else []

    def note(self, top_candidates: Sequence[tuple[int, ...]]) -> None:
        """Note the rows of the tokens committed last, after their ids were appended; missing ones are filled up."""
        missing = len(self.output_token_ids) - len(self.top_candidates)
        rows = list(top_candidates[:missing])
        self.top_candidates.extend(rows + [()] * (missing - len(rows)))


class ProposalCollector:
    """The proposals of one round, before the vote. Drafters cast into it; it closes once and then takes nothing more.

    It closes when every drafter asked has answered; or the soft deadline has passed and a quorum has; or the hard
    deadline has passed. Both deadlines count from the moment the drafters were asked.
    """

    __slots__ = (
        *("_awaited", "_hard_at", "_loop", "_num_asked", "_quorum", "_soft_at", "_timer", "_waiter"),
        *("answered_at", "closed", "proposals"),
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, *, soft_s: float, hard_s: float, quorum: float) -> None:
        """`quorum`: the share of the drafters asked, 0 to 1."""
        now = loop.time()
        self._loop = loop
        self._soft_at, self._hard_at, self._quorum = now + soft_s, now + hard_s, quorum
        self._awaited: set[RequestDrafter] = set()
        self._num_asked = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle
        self.closed = False
        self.proposals: list[tuple[RequestDrafter, tuple[Proposal, ...]]] = []
        self.answered_at: dict[str, float] = {}
        """Drafter id to when its answer came, by the loop's time."""

    def expect(self, drafter: RequestDrafter) -> None:
        """Count a drafter as asked; called before it is asked."""
        self._awaited.add(drafter)
        self._num_asked += 1

    def withdraw(self, drafter: RequestDrafter) -> None:
        """Do not wait for this drafter: it could not be asked, or it was lost."""
        if drafter in self._awaited:
            self._awaited.discard(drafter)
            self._num_asked -= 1
            self._wake()

    def cast(self, drafter: RequestDrafter, proposals: tuple[Proposal, ...]) -> bool:
        """Take an answer, empty to abstain. False: too late, or a second one; the caller drops and counts it."""
        if self.closed or drafter not in self._awaited:
            return False
        self._awaited.discard(drafter)
        self.proposals.append((drafter, proposals))
        self.answered_at[drafter.drafter_id] = self._loop.time()
        self._wake()
        return True

    async def close(self) -> frozenset[RequestDrafter]:
        """Wait as the rule above says, then take nothing more. Returns the drafters that missed it."""
        try:
            if not self._complete():
                self._waiter = self._loop.create_future()
                self._timer = self._loop.call_at(self._soft_at, self._on_soft_deadline)
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                    self._timer.cancel()
        finally:
            self.closed = True
        return frozenset(self._awaited)

    @property
    def is_waiting(self) -> bool:
        """Whether a drafter that was asked has not answered yet."""
        return bool(self._awaited)

    @property
    def num_asked(self) -> int:
        return self._num_asked

    def _complete(self) -> bool:
        if not self._awaited:
            return True
        now = self._loop.time()
        if now >= self._hard_at:
            return True
        return now >= self._soft_at and len(self.proposals) >= math.ceil(self._quorum * self._num_asked)

    def _on_soft_deadline(self) -> None:
        self._wake()
        if self._waiter is not None and not self._waiter.done():
            self._timer = self._loop.call_at(self._hard_at, self._on_hard_deadline)

    def _on_hard_deadline(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._complete():
            self._waiter.set_result(None)


class RequestDrafter(Protocol):
    """One drafter (a pool of alike replicas, or a drafter in this process), for one request."""

    @property
    def drafter_id(self) -> str: ...

    def prepare(self) -> None:
        """Begin to learn the prefix, while the target does: the first question may then be answered in time."""
        ...

    def ask(self, box: ProposalCollector, num_speculative_tokens: int, width: int) -> bool:
        """Ask for what follows the prefix; the answer is cast into `box`, now or later.

        False: not asked (no replica, ejected, the prefix is past its context). Never waits and never raises.
        """
        ...

    @property
    def answer_seconds(self) -> float | None:
        """Seconds that its answers usually take; 0 where it answers at once, None where that is not known."""
        ...

    def missed(self) -> None:
        """The box closed without this drafter's answer."""
        ...

    def answered(self) -> None:
        """The answer came in time and could be used."""
        ...

    def malformed(self, reason: str) -> None:
        """The answer could not be used."""
        ...

    def end(self, *, aborted: bool) -> None:
        """The request is over. Called once."""
        ...


class Target(Protocol):
    """The verifier of one request. Moves to another one when it is lost, which the caller does not notice."""

    async def open(self) -> Verification:
        """Prefill the prefix and return the next token.

        Raises NoCapacity (no verifier can serve it within the configured wait), RequestPoisoned (this request fails by
        itself or killed two verifiers), InvalidRequest, DeadlineExceeded.
        """
        ...

    @property
    def verifier_id(self) -> str:
        """Id of the verifier that the next draft goes to, as things stand; empty while there is none."""
        ...

    async def verify(self, draft: Draft) -> tuple[Verification, bool]:
        """What the target makes of `draft`, and whether the request had to move.

        If so the draft is lost, and the answer is that of `open` at the new place. Raises as `open`.
        """
        ...

    async def room(self) -> None:
        """Wait until the pool of drafts to verify has room: drafting for a request behind a full pool is early."""
        ...

    def end(self, *, aborted: bool) -> None:
        """The request is over. Called once, also when opening failed."""
        ...


class Targets(Protocol):
    """The source of targets: rounds get the target of a request from it."""

    def target(self, prefix: Prefix, num_top_candidates: int) -> Target: ...

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that one verification may carry."""
        ...

    @property
    def context_limit(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token_ids(self) -> frozenset[int]: ...


class DrafterSource(Protocol):
    """One entry of the drafter set: makes the drafter of a request."""

    @property
    def drafter_id(self) -> str: ...

    @property
    def wants_top_candidates(self) -> bool: ...

    def serves(self, prefix: Prefix) -> bool:
        """Whether it has a vote in this request."""
        ...

    def drafter(self, prefix: Prefix) -> RequestDrafter: ...


def known_ids(sources: Iterable[DrafterSource]) -> str:
    """The known ids as messages show them: in order, or "none"."""
    return ", ".join(sorted(source.drafter_id for source in sources)) or "none"
