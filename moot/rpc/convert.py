"""Messages to core types and back: the only place that knows both."""

from __future__ import annotations

from collections.abc import Sequence

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

_FINISH_TO_PB = {
    None: token_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: token_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: token_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: token_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: token_pb2.FINISH_REASON_ERROR,
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


def sampling_to_pb(params: SamplingParams) -> token_pb2.SamplingParams:
    return token_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=sorted(params.allowed_token_ids or ()),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        seed=params.seed,
        logprobs=params.logprobs,
    )


def sampling_from_pb(message: token_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=frozenset(message.allowed_token_ids) or None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        seed=message.seed,
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


def _timing_to_pb(verification: Verification) -> verifier_service_pb2.StepTiming:
    return verifier_service_pb2.StepTiming(
        queue_us=verification.queue_us,
        forward_us=verification.forward_us,
        batch_requests=verification.batch_requests,
        batch_tokens=verification.batch_tokens,
        inside_us=verification.inside_us,
        batch_prefill_tokens=verification.batch_prefill_tokens,
    )


def opened_to_pb(verification: Verification) -> verifier_service_pb2.SessionOpened:
    return verifier_service_pb2.SessionOpened(
        base_length=verification.base_length,
        output_token_ids=verification.output_token_ids,
        finish_reason=finish_to_pb(verification.finish_reason),
        logprobs=[logprobs_to_pb(entry) for entry in verification.logprobs],
        top_candidates=top_candidates_to_pb(verification.top_candidates),
        num_cached_tokens=verification.num_cached_tokens,
        timing=_timing_to_pb(verification),
        proposals=[proposal_to_pb(proposal) for proposal in verification.proposals],
    )


def opened_from_pb(message: verifier_service_pb2.SessionOpened) -> Verification:
    return Verification(
        base_length=message.base_length,
        num_accepted=0,
        output_token_ids=tuple(message.output_token_ids),
        finish_reason=finish_from_pb(message.finish_reason),
        logprobs=tuple(logprobs_from_pb(entry) for entry in message.logprobs),
        top_candidates=top_candidates_from_pb(message.top_candidates),
        proposals=tuple(proposal_from_pb(proposal) for proposal in message.proposals),
        num_cached_tokens=message.num_cached_tokens,
        queue_us=message.timing.queue_us,
        forward_us=message.timing.forward_us,
        batch_requests=message.timing.batch_requests,
        batch_tokens=message.timing.batch_tokens,
        inside_us=message.timing.inside_us,
        batch_prefill_tokens=message.timing.batch_prefill_tokens,
    )


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


def verified_to_pb(verification: Verification, round_index: int) -> verifier_service_pb2.DraftVerified:
    return verifier_service_pb2.DraftVerified(
        round_index=round_index,
        base_length=verification.base_length,
        num_accepted=verification.num_accepted,
        output_token_ids=verification.output_token_ids,
        finish_reason=finish_to_pb(verification.finish_reason),
        logprobs=[logprobs_to_pb(entry) for entry in verification.logprobs],
        top_candidates=top_candidates_to_pb(verification.top_candidates),
        proposals=[proposal_to_pb(proposal) for proposal in verification.proposals],
        timing=_timing_to_pb(verification),
    )


def verified_from_pb(message: verifier_service_pb2.DraftVerified) -> Verification:
    return Verification(
        base_length=message.base_length,
        num_accepted=message.num_accepted,
        output_token_ids=tuple(message.output_token_ids),
        finish_reason=finish_from_pb(message.finish_reason),
        logprobs=tuple(logprobs_from_pb(entry) for entry in message.logprobs),
        top_candidates=top_candidates_from_pb(message.top_candidates),
        proposals=tuple(proposal_from_pb(proposal) for proposal in message.proposals),
        queue_us=message.timing.queue_us,
        forward_us=message.timing.forward_us,
        batch_requests=message.timing.batch_requests,
        batch_tokens=message.timing.batch_tokens,
        inside_us=message.timing.inside_us,
        batch_prefill_tokens=message.timing.batch_prefill_tokens,
    )


def model_info_to_pb(info: ModelInfo) -> token_pb2.ModelInfo:
    return token_pb2.ModelInfo(
        model=info.model,
        revision=info.revision,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        context_limit=info.context_limit,
        end_token_ids=sorted(info.end_token_ids),
    )


def model_info_from_pb(message: token_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        revision=message.revision,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_limit=message.context_limit,
        end_token_ids=frozenset(message.end_token_ids),
    )
