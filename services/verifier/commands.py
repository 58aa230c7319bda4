"""Commands of streams to the verifier's engine, and its answers: plain data, so the engine runs without gRPC as well.

`session_id` is unique within the stream that opened the session and never reused there.
"""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.errors import MootError
from moot.core.types import Draft, SamplingParams, Verification


@dataclass(frozen=True, slots=True)
class Open:
    """Prefill prompt + committed output, then sample the next token."""

    session_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    num_top_candidates: int = 0
    inside_drafter_ids: tuple[str, ...] = ()
    """Drafters attached to the verifier that may propose, up to `inside_width` chains each."""
    inside_width: int = 1
    num_inside_tokens: int = 0
    """Of their proposals that come with the answer; 0: none are made."""
    traceparent: str = ""
    """Context of the request's trace; empty: it is not traced."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify a draft. `base_length`: prompt + committed tokens, as the sender counts them. `round_index` grows with
    every verify."""

    session_id: int
    round_index: int
    base_length: int
    draft: Draft
    num_inside_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ended for a reason that the verifier does not see (a stop string). Nothing is answered."""

    session_id: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The request is not wanted any more. Nothing is answered."""

    session_id: int


Command = Open | Verify | Finish | Abort


@dataclass(frozen=True, slots=True)
class Opened:
    session_id: int
    verification: Verification


@dataclass(frozen=True, slots=True)
class Verified:
    session_id: int
    round_index: int
    verification: Verification


@dataclass(frozen=True, slots=True)
class Failed:
    """The session is gone; others go on. `message` holds no token."""

    session_id: int
    error: type[MootError]
    """One whose row in errors.ERRORS names a session failure."""
    message: str
    round_index: int = 0


Answer = Opened | Verified | Failed
