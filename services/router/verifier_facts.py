"""What verifiers say of themselves, and what their answers must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moot.core.errors import (
    Draining,
    InvalidRequest,
    NoCapacity,
    OutOfMemory,
    PeerError,
    RequestPoisoned,
    UnknownSession,
)
from moot.core.generation import is_path
from moot.core.types import Draft, ModelInfo, Verification
from moot.rpc import convert
from moot.v1 import verifier_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class InsideFacts:
    """A drafter inside a verifier."""

    drafter_id: str
    kind: str
    family: str


@dataclass(frozen=True, slots=True)
class VerifierFacts:
    """What Describe said of the verifier at one address."""

    info: ModelInfo
    numerics_fingerprint: str
    max_num_seqs: int
    max_draft_tokens: int
    kv_capacity_tokens: int
    deterministic: bool
    drafters: tuple[InsideFacts, ...] = ()
    """Those that live inside it."""
    max_waiting_seqs: int = 0
    """Sessions beyond `max_num_seqs` that it lets wait; 0: it has not said."""

    @classmethod
    def from_pb(cls, answer: pb.DescribeVerifierResponse) -> VerifierFacts:
        return cls(
            info=convert.model_info_from_pb(answer.model),
            numerics_fingerprint=answer.numerics_fingerprint,
            max_num_seqs=max(1, answer.max_num_seqs),
            max_draft_tokens=answer.max_draft_tokens,
            kv_capacity_tokens=answer.kv_capacity_tokens,
            deterministic=answer.deterministic,
            drafters=tuple(InsideFacts(one.drafter_id, one.kind, one.family or one.kind) for one in answer.drafters),
            max_waiting_seqs=answer.max_waiting_seqs,
        )


_FAILURES: dict[int, Callable[[str], Exception]] = {
    pb.SessionFailed.CODE_UNKNOWN_SESSION: UnknownSession,
    pb.SessionFailed.CODE_INVALID: InvalidRequest,
    pb.SessionFailed.CODE_POISONED: RequestPoisoned,
    pb.SessionFailed.CODE_NO_CAPACITY: NoCapacity,
    pb.SessionFailed.CODE_DRAINING: Draining,
    pb.SessionFailed.CODE_NO_MEMORY: OutOfMemory,
}


def failure_of(failed: pb.SessionFailed, is_opening: bool) -> Exception:
    """What a session is told whose verifier gave it up."""
    make = _FAILURES.get(failed.code, PeerError)
    if make is UnknownSession and is_opening:
        # It cannot fail to know what it is being told: count it among the verifier's own faults.
        make = PeerError
    return make(failed.message or "the verifier gave the session up")


def checked(verification: Verification, draft: Draft, vocab_size: int | None) -> Verification:
    """`verification` of `draft`. Raises ValueError: a verifier that breaks the contract is not used further."""
    output, accepted = verification.output_token_ids, verification.num_accepted
    if not accepted <= len(output) <= accepted + 1 or accepted > len(draft):
        raise ValueError("the counts of tokens do not fit")
    if not is_path(draft, output[:accepted]):
        raise ValueError("the accepted tokens are no path of the draft")
    if verification.finish_reason is None and len(output) != accepted + 1:
        raise ValueError("no next token, and no end")
    if vocab_size is not None and output and max(output) >= vocab_size:
        raise ValueError("an id outside the vocabulary")
    return verification
