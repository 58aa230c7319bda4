"""One request on the verifier: what it has committed, what it waits for, and where its KV cache stands.

The life of a session, all of it on the compute thread:

    open ──► waiting ──► admitted (holds KV) ──► answered ──► idle ──► verify ... ──► gone
                ▲              │ preempted
                └──────────────┘

It ends by its own finish reason, `Finish`, `Abort`, the end of its stream, a failure, or its idle lease.
Prompt + committed output is all that matters: the KV cache can be dropped and filled again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moot.core.types import ROOT, Draft, SamplingParams
from moot.drafters.attached.attached_interface import NO_GUESSES, Guesses
from moot.model.cache.kv_cache import depths_of
from moot.runtime.tracing import Span
from services.verifier.commands import Answer

if TYPE_CHECKING:
    from moot.model.cache.kv_cache import KvCache
    from moot.model.sampling.sampler import History

NO_ROUND = -1
"""`round_index` of the work that an opening is, and of a session that has verified nothing yet."""


@dataclass(frozen=True, slots=True)
class PendingWork:
    """The pending work of a session: the token after its prefix (an opening), or the verification of a draft."""

    draft: Draft
    fed_nodes: tuple[int, ...]
    """Nodes of the draft that take a row of the forward pass, ascending; closed under parents."""
    num_fed_levels: int
    """Depth of the tree that they make: siblings share a position, so this many KV slots are needed for them."""
    round_index: int
    arrived_ns: int
    """Monotonic."""
    guesses: Guesses = NO_GUESSES
    """Guesses fed beside them, for drafters attached to this verifier, and never accepted."""

    @classmethod
    def opening(cls, arrived_ns: int) -> PendingWork:
        return cls(Draft(), (), 0, NO_ROUND, arrived_ns)

    @classmethod
    def verification(cls, draft: Draft, max_new: int, round_index: int, arrived_ns: int) -> PendingWork:
        """The verification of a draft. It feeds only nodes after which one of the `max_new` tokens that may still come
        can be emitted.

        A node at depth d (0 for children of the prefix) is reached with d + 1 tokens emitted, so these are the depths
        below `max_new` - 1. Leaving the others out changes no token and keeps positions inside the context limit.
        """
        depths: list[int] = []
        for parent in draft.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        fed = tuple(node for node, depth in enumerate(depths) if depth < max_new - 1)
        num_levels = max((depths[node] + 1 for node in fed), default=0)
        return cls(draft, fed, num_levels, round_index, arrived_ns)

    def with_guesses(self, guesses: Guesses) -> PendingWork:
        levels = max(self.num_fed_levels, 1 + max(depths_of(guesses.parents), default=-1))
        return replace(self, guesses=guesses, num_fed_levels=levels)

    @property
    def is_opening(self) -> bool:
        return self.round_index == NO_ROUND


@dataclass(slots=True, eq=False)
class Session:
    """One request on the verifier. `token_ids`: prompt + committed output. `arrival` orders sessions by age; it is
    unique in an engine."""

    stream: AnswerStream
    session_id: int
    request_id: str
    arrival: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    ending_token_ids: frozenset[int]
    context_limit: int
    history: History
    cache: KvCache
    cache_salt: str = ""
    num_top_candidates: int = 0
    inside_drafter_ids: tuple[str, ...] = ()
    inside_width: int = 1
    num_inside_tokens: int = 0
    """Of proposals to be made with the answer to the present work, where drafters attached to the verifier may."""
    cached_length: int = 0
    """Leading tokens whose KV the cache holds; mirrors the cache, which only the step changes."""
    work: PendingWork | None = None
    round_index: int = NO_ROUND
    num_cached_tokens: int = 0
    was_admitted: bool = False
    last_active_ns: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the prompt's whole blocks."""
    num_shared_blocks: int = 0
    num_waiting_tokens: int = 0
    """Tokens that the command queue still counts for this session as waiting to be prefilled."""
    traced: Span = field(default_factory=Span)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens of the prefix without KV: at least 1, because the last one is fed with the draft."""
        return len(self.token_ids) - self.cached_length

    @property
    def num_kv_tokens(self) -> int:
        """Slots of KV that the session holds (a rejected draft may leave a page more than its length needs) or will
        need."""
        return max(self.cache.num_slots, self.length + (self.work.num_fed_levels if self.work else 0))

    @property
    def max_new(self) -> int:
        """Tokens the request may still emit."""
        return min(self.params.max_tokens - self.num_output_tokens, self.context_limit - self.length)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens and guesses that take a row of the forward pass."""
        return len(self.work.fed_nodes) + len(self.work.guesses.token_ids) if self.work else 0

    @property
    def has_work(self) -> bool:
        return self.work is not None


@dataclass(slots=True, eq=False)
class AnswerStream:
    """The stream of the peer that opened the sessions. `deliver` is called from the compute thread and must not
    block."""

    deliver: Callable[[Sequence[Answer]], None]
    sessions: dict[int, Session] = field(default_factory=dict)
    """By session id; touched by the compute thread only."""
    num_queued: int = 0
    """Commands that wait in the command queue; the queue alone changes this and `is_over`."""
    is_over: bool = False
