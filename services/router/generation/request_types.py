"""The types that the router's parts exchange: a generation asked for, its chunks, its record. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moot.core.options import Options, option
from moot.core.types import FinishReason, SamplingParams, TokenLogprobs
from moot.drafters.request.siblings import Siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalOptions(Options):
    """Options of a refusal."""

    retry_after_s: float = option(
        1.0, help="seconds that a refused caller is told to wait, until they can be estimated", minimum=0
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Places: sessions that the verifiers take, in their batches, and waiting for a place in one."""

    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One choice to generate: validated, tokenized, with a seed. `request_id` is unique per choice."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    num_speculative_tokens: int | None = None
    """0: no drafting; n: always n; None: the policy decides."""
    drafters: tuple[str, ...] | None = None
    """Drafter ids to use; None: all."""
    cache_salt: str = ""
    output_token_ids: tuple[int, ...] = ()
    """Already committed (a resumed request)."""
    body_fingerprint: str = ""
    stop_strings: tuple[str, ...] = ()
    """These three make the text of the ids (text.py); they stand here so that the record has them."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    epoch: int = 0
    """0: a new request, whose record is written first. Else the epoch under which its record was claimed."""
    prediction_token_ids: tuple[int, ...] = ()
    """The likely answer, where the caller sent one."""
    siblings: Siblings | None = field(default=None, compare=False, repr=False)
    """Shared by the choices of one prompt, where there are several; `choice_index`: which of them this one is."""
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class DrafterMetrics:
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    """Leading tokens of its own proposals that the target then emitted, won or not."""
    num_votes_won: int = 0


@dataclass(frozen=True, slots=True)
class GenerationMetrics:
    """Metrics of one choice, in vLLM's terms. Tokens cut off by a stop count nowhere."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: tuple[int, ...]
    drafters: Mapping[str, DrafterMetrics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that pushing token ids into an assembler released.

    `text`: safe to show now. `num_tokens_kept`: of the pushed ids, those that belong to the output; fewer than pushed
    only when a stop string was completed (`stopped`): the output's ids end with the token that completed it.
    """

    text: str
    num_tokens_kept: int
    stopped: bool = False
    stop_reason: str | None = None


class TextAssembler(Protocol):
    """Ids to text for one choice: whole characters only, nothing of a possible stop string early."""

    def push(self, token_ids: Sequence[int]) -> TextDelta: ...

    def flush(self) -> str:
        """Release the held-back tail, when the output ended without a stop string."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """Committed tokens with the text that they made safe to show, on their way from the round that commits them to the
    reply.

    The last one has `finish_reason` and `metrics`; chunks have no gap and no overlap.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: GenerationMetrics | None = None
    durable: bool = True
    """False: the store was not reachable when these tokens were committed (degraded mode)."""


class Generator(Protocol):
    """The rounds, as the HTTP and gRPC APIs see them. Closing the iterator aborts and frees everything."""

    def generate(self, request: GenerationRequest, assembler: TextAssembler) -> AsyncIterator[GenerationChunk]: ...


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The durable state of one request: enough to rebuild its ids and its text anywhere."""

    request_id: str
    epoch: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    params: SamplingParams
    model: str
    tokenizer_fingerprint: str
    stop_strings: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    body_fingerprint: str = ""
    finish_reason: FinishReason | None = None


class RequestStore(Protocol):
    """The record of every request. The router is its only writer; a commit is durable before its tokens are emitted.

    In mode `degrade` an unreachable server never raises here: `commit` returns False (not durable) and the missing
    tail is repaired later. CommitFenced, CommitConflict and CommitTerminal always raise.
    """

    async def create(self, record: RequestRecord) -> bool:
        """Write a new record with epoch 1. False: not durable. Mode `required`, server unreachable: NoCapacity."""
        ...

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        """Append `token_ids` after `expected_length` output tokens. The same call twice counts once."""
        ...

    def release(self, request_id: str) -> None:
        """Let go of a request, ended or not: the router no longer prolongs its lease, so that an open record can be
        claimed, and keeps nothing in memory that the record has."""
        ...

    async def load(self, request_id: str) -> RequestRecord | None: ...

    async def claim(self, request_id: str) -> RequestRecord:
        """Become the owner when the lease is over: a new epoch that fences the old owner's commits."""
        ...

    async def close(self) -> None: ...
