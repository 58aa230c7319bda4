"""Settings of the HTTP API: its limits, and what it may ask about the rest of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moot.core.errors import MootError
from moot.core.options import Options, option, option_of
from moot.core.types import ModelInfo
from services.router.generation.request_types import Places, RefusalOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(Options):
    """Limits of the HTTP API. Durations in seconds, sizes in bytes unless the name says otherwise."""

    served_model_names: tuple[str, ...] = option(
        (), flag="served_model_name", help="names of the model in the API (none: the last part of --model)"
    )
    """Names accepted as `model`; the first is used in answers to requests that name none."""
    max_body_bytes: int = option(
        8 * 1024 * 1024,
        help="size limit of a request body in bytes",
        minimum=1,
    )
    max_json_depth: int = 32
    max_json_values: int = 250_000
    """Numbers, texts, lists and objects in a body, beside a prompt of ids that fills the context."""
    body_timeout_s: float = 30.0
    """For the whole body to arrive."""
    max_prompt_bytes: int = 2 * 1024 * 1024
    """Whatever the context, a longer prompt is not tokenized."""
    tokenize_timeout_s: float = 20.0
    tokenize_threads: int = 2
    max_choices: int = 256
    """Prompts times n in one request."""
    max_choices_in_flight: int = option(
        1024,
        help="most choices generated at a time; one more is refused with 503",
        minimum=1,
    )
    max_choices_per_key: int = option(
        256,
        help="most choices of one API key at a time; one more is refused with 429",
        minimum=1,
    )
    """Without keys: of all callers together."""
    max_queued_tokens: int = option(
        1_048_576,
        help="most tokens (prompt and max_tokens) of choices that no verifier has begun; more are refused with 503",
        minimum=1,
    )
    max_queued_tokens_per_key: int = option(
        262_144,
        help="most such tokens of one API key; more are refused with 429",
        minimum=1,
    )
    """Without keys there is no such share."""
    assumed_output_tokens: int = 512
    """What a choice that names no `max_tokens` counts in the queue."""
    shed_share: float = option(
        0.5,
        help="part of the queue, of tokens or of the verifiers' waiting places, that may be taken until no round "
        "drafts any more, 0 to 1; 1: drafting goes on",
        minimum=0,
        maximum=1,
    )
    retry_after_s: float = option_of(RefusalOptions, "retry_after_s")
    stream_buffer_bytes: int = option(
        65_536,
        help="bytes of one answer that wait for a slow reader, in the router and again in the connection, until it "
        "pauses",
        minimum=1,
    )
    slow_client_timeout_s: float = option(
        60.0,
        help="seconds in which a client must make room in a full buffer; then its connection is ended",
        above=0,
    )
    chunk_timeout_s: float = 1300.0
    """Longest wait for a choice's next chunk: every wait that a request survives, prefill and queue included."""
    abort_timeout_s: float = 10.0
    """For an aborted generation to let go."""


class FrontState(Protocol):
    """The rest of the router, as far as the HTTP API depends on it. Cheap calls without I/O."""

    def model_info(self) -> ModelInfo | None:
        """The model that is served; None before any verifier was seen."""
        ...

    def refusal(self) -> MootError | None:
        """Why new requests are refused now (Draining, NoCapacity); None: they are taken."""
        ...

    def drafter_ids(self) -> frozenset[str] | None:
        """Names a request may put in `drafters`; None: not known, the rounds decide."""
        ...

    def places(self) -> Places | None:
        """Places of the verifiers that can be asked now; None: not known."""
        ...

    def shortage(self) -> MootError | None:
        """Why a new request would be refused by every verifier now, though all is well; None: it would not."""
        ...
