"""The scheduler: which sessions' tokens go into the next forward pass. It has no tensor and no clock.

The rules, in the order in which they act at a step's boundary:

1. Preemption: when the sessions that hold KV have grown past its pages, the youngest lose theirs, wait again and are
filled anew later. The oldest is never preempted and fits alone, so the batch always moves on. 2. Admission: a session
with work and no KV gets KV in order of age, while there are pages and places. No session overtakes another. 3.
Verifications before prefills, longest waiting first, within the token budget less what rule 4 needs. 4. Prefills share
one chunk budget and take turns, so that a long prompt delays every other session, other prompts included, by no more
than one chunk.

Where numbers do not depend on batch-mates (batch-invariant mode), none of this changes a bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moot.core.options import Options, option


class Schedulable(Protocol):
    """What the scheduler sees of a session.

    `num_kv_tokens`: slots of KV that it holds, or will hold when its present work is done, whichever is more.
    """

    @property
    def arrival(self) -> int: ...
    @property
    def num_kv_tokens(self) -> int: ...
    @property
    def num_missing(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def has_work(self) -> bool: ...


SessionT = TypeVar("SessionT", bound=Schedulable)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(Options):
    """What one step may hold."""

    max_num_batched_tokens: int = option(
        1024, help="most tokens of one forward pass, drafts and prefill chunks together", minimum=1
    )
    prefill_chunk_tokens: int = option(
        256, help="most prompt tokens of one forward pass, all prompts together", minimum=1
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step and of the KV cache: tokens, except `max_num_seqs` (sessions) and `num_pages` (of `page_tokens`
    tokens each)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    num_pages: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class BatchItem(Generic[SessionT]):
    """One session's part of a batch: the next `num_prefix_tokens` missing tokens of its prefix; if it `completes`, the
    draft after them too."""

    session: SessionT
    num_prefix_tokens: int
    completes: bool

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + (self.session.num_draft_tokens if self.completes else 0)


@dataclass(frozen=True, slots=True)
class Changes(Generic[SessionT]):
    """Sessions that lost KV and sessions that got some: the caller frees and fills their caches before it asks for a
    plan."""

    preempted: tuple[SessionT, ...]
    admitted: tuple[SessionT, ...]


@dataclass(frozen=True, slots=True)
class Batch(Generic[SessionT]):
    items: tuple[BatchItem[SessionT], ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class Scheduler(Generic[SessionT]):
    """Decides which sessions hold KV and which tokens the next step feeds. Not thread-safe: the compute thread owns
    it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._admitted: dict[int, SessionT] = {}
        self._waiting: dict[int, SessionT] = {}
        # Age of each session's wait: the count at which a session's work came, or at which it was last given a chunk.
        self._turn: dict[int, int] = {}
        self._next_turn = 0

    @property
    def admitted(self) -> Collection[SessionT]:
        """The sessions that hold KV, oldest first."""
        return self._admitted.values()

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_used_pages(self) -> int:
        return sum(self._pages(session) for session in self._admitted.values())

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(session.has_work for session in self._admitted.values())

    def submit(self, session: SessionT) -> None:
        """`session` has got work: it waits for KV unless it holds some."""
        self._give_turn(session)
        if session.arrival not in self._admitted:
            self._waiting[session.arrival] = session

    def remove(self, session: SessionT) -> None:
        """Forget a session that has ended."""
        self._admitted.pop(session.arrival, None)
        self._waiting.pop(session.arrival, None)
        self._turn.pop(session.arrival, None)

    def rearrange(self) -> Changes[SessionT]:
        """Rules 1 and 2, at the beginning of a step."""
        preempted = self._shrink()
        return Changes(tuple(preempted), tuple(self._admit()))

    def plan(self) -> Batch[SessionT]:
        """Rules 3 and 4: the next batch, empty when nothing can be done. Feeding it is the caller's part."""
        working = [session for session in self._admitted.values() if session.has_work]
        working.sort(key=lambda session: self._turn[session.arrival])
        prefilling = [session for session in working if session.num_missing > 1]
        verifying = [session for session in working if session.num_missing == 1]
        reserved = min(self._limits.prefill_chunk_tokens, sum(session.num_missing for session in prefilling))
        items = self._verifications(verifying, self._limits.max_num_batched_tokens - reserved)
        return Batch((*items, *self._prefills(prefilling)))

    def _pages(self, session: SessionT) -> int:
        return -(-session.num_kv_tokens // self._limits.page_tokens)

    def _admit(self) -> list[SessionT]:
        admitted = []
        for arrival in sorted(self._waiting):
            session = self._waiting[arrival]
            full = len(self._admitted) >= self._limits.max_num_seqs
            if full or self.num_used_pages + self._pages(session) > self._limits.num_pages:
                break
            self._admitted[arrival] = self._waiting.pop(arrival)
            admitted.append(session)
        return admitted

    def _shrink(self) -> list[SessionT]:
        """Preempt the youngest until the pages of all others fit."""
        preempted = []
        while len(self._admitted) > 1 and self.num_used_pages > self._limits.num_pages:
            youngest = self._admitted.pop(max(self._admitted))
            preempted.append(youngest)
            if youngest.has_work:
                self._waiting[youngest.arrival] = youngest
        return preempted

    def _verifications(self, sessions: Sequence[SessionT], budget: int) -> list[BatchItem[SessionT]]:
        items: list[BatchItem[SessionT]] = []
        for session in sessions:
            item = BatchItem(session, 1, True)
            if item.num_tokens > budget:
                break
            budget -= item.num_tokens
            items.append(item)
        return items

    def _prefills(self, sessions: Sequence[SessionT]) -> list[BatchItem[SessionT]]:
        items: list[BatchItem[SessionT]] = []
        budget = self._limits.prefill_chunk_tokens
        for session in sessions:
            # A draft waits until its prefix is there, so that a prefill chunk is always a chain.
            needed = session.num_missing - (1 if session.num_draft_tokens else 0)
            chunk = min(budget, needed)
            if chunk == 0:
                break
            budget -= chunk
            items.append(BatchItem(session, chunk, chunk == session.num_missing))
            self._give_turn(session)
        return items

    def _give_turn(self, session: SessionT) -> None:
        self._turn[session.arrival] = self._next_turn
        self._next_turn += 1
