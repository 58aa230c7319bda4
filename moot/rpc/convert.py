"""Messages to core types and back: the only place that knows both."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from moot.core.errors import SESSION_FAILURES, MootError, PeerError, row_of
from moot.core.types import (
    Draft,
    FinishReason,
    ModelInfo,
    Proposal,
    SamplingParams,
    TokenLogprobs,
    Verification,
)
from moot.v1 import token_pb2, verifier_service_pb2

_FINISH_TO_PB: dict[FinishReason | None, token_pb2.FinishReason.ValueType] = {
    None: token_pb2.FINISH_REASON_UNSPECIFIED,
    **{reason: token_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason},
}
_FINISH_FROM_PB: dict[int, FinishReason | None] = {int(value): key for key, value in _FINISH_TO_PB.items()}


_FAILURE_NAMES: dict[int, str] = {number: name for name, number in verifier_service_pb2.SessionFailed.Code.items()}


def finish_to_pb(reason: FinishReason | None) -> token_pb2.FinishReason.ValueType:
    return _FINISH_TO_PB[reason]


def finish_from_pb(value: int) -> FinishReason | None:
    """The finish reason of a message. Raises ValueError for a number this version does not know."""
    if value not in _FINISH_FROM_PB:
        raise ValueError(f"unknown finish reason {value}")
    return _FINISH_FROM_PB[value]


# Fields that are the same in the message and in the core's type.
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "ignore_eos", "seed"),
)
_MODEL = ("model", "revision", "tokenizer_fingerprint", "vocab_size", "context_limit")
_TIMING = ("queue_us", "forward_us", "batch_requests", "batch_tokens", "inside_us", "batch_prefill_tokens")
# As the last arguments of a Verification.
_timing_of = attrgetter(*_TIMING)


def _same(names: Sequence[str], source: object) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def sampling_to_pb(params: SamplingParams) -> token_pb2.SamplingParams:
    return token_pb2.SamplingParams(
        **_same(_SAMPLING, params),
        logit_bias=params.logit_bias,
        allowed_token_ids=sorted(params.allowed_token_ids or ()),
        stop_token_ids=sorted(params.stop_token_ids),
        logprobs=params.logprobs,
    )


def sampling_from_pb(message: token_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **_same(_SAMPLING, message),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=frozenset(message.allowed_token_ids) or None,
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def proposal_to_pb(proposal: Proposal, drafter_id: str = "") -> token_pb2.Proposal:
    """`drafter_id`: of the process that sends it, where the proposal names none."""
    return token_pb2.Proposal(
        drafter_id=proposal.drafter_id or drafter_id,
        token_ids=proposal.token_ids,
        confidences=bytes(proposal.confidences),
    )


def proposal_from_pb(message: token_pb2.Proposal, drafter_id: str = "") -> Proposal:
    """`drafter_id`: the router's own name for the sender, which goes before what the sender says."""
    return Proposal(tuple(message.token_ids), tuple(message.confidences), drafter_id or message.drafter_id)


def draft_to_pb(
    draft: Draft, round_index: int, base_length: int, num_inside_tokens: int = 0
) -> verifier_service_pb2.VerifyDraft:
    return verifier_service_pb2.VerifyDraft(
        round_index=round_index,
        base_length=base_length,
        draft_token_ids=draft.token_ids,
        parent_indices=() if draft.is_chain else draft.parents,
        num_inside_tokens=num_inside_tokens,
    )


def draft_from_pb(message: verifier_service_pb2.VerifyDraft) -> Draft:
    """The draft of a message. Raises ValueError when the parents do not make a forest over the prefix."""
    token_ids, parents = tuple(message.draft_token_ids), tuple(message.parent_indices)
    if not parents:
        return Draft.chain(token_ids)
    if len(parents) != len(token_ids) or any(not -1 <= parent < index for index, parent in enumerate(parents)):
        raise ValueError("parent_indices must be one per draft token, each before it or -1")
    if len(set(zip(parents, token_ids, strict=True))) != len(token_ids):
        raise ValueError("siblings of a draft must carry different ids")
    return Draft(token_ids, parents)


def logprobs_to_pb(entry: TokenLogprobs) -> token_pb2.TokenLogprobs:
    return token_pb2.TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=[token for token, _ in entry.top],
        top_logprobs=[value for _, value in entry.top],
    )


def logprobs_from_pb(message: token_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob, message.rank, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )


def top_candidates_to_pb(rows: Sequence[Sequence[int]]) -> token_pb2.TopCandidates | None:
    """The message of top candidates, None for no rows; all rows have one width."""
    if not rows:
        return None
    return token_pb2.TopCandidates(width=len(rows[0]), token_ids=[token for row in rows for token in row])


def top_candidates_from_pb(message: token_pb2.TopCandidates) -> tuple[tuple[int, ...], ...]:
    """The rows of top candidates in a message. Raises ValueError when the ids do not fill whole rows."""
    width, ids = message.width, message.token_ids
    if not ids:
        return ()
    if width == 0 or len(ids) % width:
        raise ValueError("top_candidates.token_ids must fill rows of top_candidates.width")
    return tuple(tuple(ids[start : start + width]) for start in range(0, len(ids), width))


def _answer_to_pb(verification: Verification) -> dict[str, Any]:
    """What answers to openings and to drafts have in common."""
    return {
        "base_length": verification.base_length,
        "output_token_ids": verification.output_token_ids,
        "finish_reason": finish_to_pb(verification.finish_reason),
        "logprobs": [logprobs_to_pb(entry) for entry in verification.logprobs],
        "top_candidates": top_candidates_to_pb(verification.top_candidates),
        "proposals": [proposal_to_pb(proposal) for proposal in verification.proposals],
        "timing": verifier_service_pb2.StepTiming(**_same(_TIMING, verification)),
    }


def _answer_from_pb(
    message: verifier_service_pb2.SessionOpened | verifier_service_pb2.DraftVerified,
    num_accepted: int,
    num_cached_tokens: int,
) -> Verification:
    return Verification(
        message.base_length,
        num_accepted,
        tuple(message.output_token_ids),
        finish_from_pb(message.finish_reason),
        tuple(logprobs_from_pb(entry) for entry in message.logprobs),
        top_candidates_from_pb(message.top_candidates),
        tuple(proposal_from_pb(proposal) for proposal in message.proposals),
        num_cached_tokens,
        *_timing_of(message.timing),
    )


def opened_to_pb(verification: Verification) -> verifier_service_pb2.SessionOpened:
    return verifier_service_pb2.SessionOpened(
        **_answer_to_pb(verification), num_cached_tokens=verification.num_cached_tokens
    )


def opened_from_pb(message: verifier_service_pb2.SessionOpened) -> Verification:
    return _answer_from_pb(message, 0, message.num_cached_tokens)


def verified_to_pb(verification: Verification, round_index: int) -> verifier_service_pb2.DraftVerified:
    return verifier_service_pb2.DraftVerified(
        **_answer_to_pb(verification), round_index=round_index, num_accepted=verification.num_accepted
    )


def verified_from_pb(message: verifier_service_pb2.DraftVerified) -> Verification:
    return _answer_from_pb(message, message.num_accepted, 0)


def failed_to_pb(error: type[MootError], message: str, round_index: int) -> verifier_service_pb2.SessionFailed:
    """`error`: a class whose row names a session failure."""
    code = verifier_service_pb2.SessionFailed.Code.Value(f"CODE_{row_of(error).session_failure}")
    return verifier_service_pb2.SessionFailed(code=code, message=message, round_index=round_index)


def failed_from_pb(message: verifier_service_pb2.SessionFailed) -> MootError:
    """The error that a failed session stands for. A code this version does not know is a fault of the verifier's
    own."""
    name = _FAILURE_NAMES.get(message.code, "")
    kind = SESSION_FAILURES.get(name.removeprefix("CODE_"), PeerError)
    return kind(message.message or "the verifier gave the session up")


def model_info_to_pb(info: ModelInfo) -> token_pb2.ModelInfo:
    return token_pb2.ModelInfo(**_same(_MODEL, info), end_token_ids=sorted(info.end_token_ids))


def model_info_from_pb(message: token_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(**_same(_MODEL, message), end_token_ids=frozenset(message.end_token_ids))
