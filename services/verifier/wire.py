"""Frames to commands and answers to frames: the verifier's own half of the wire."""

from __future__ import annotations

from moot.core.types import Draft
from moot.rpc import convert
from moot.v1 import verifier_service_pb2 as pb
from services.verifier.commands import (
    Abort,
    Answer,
    Command,
    Failed,
    FailureCode,
    Finish,
    Open,
    Opened,
    Verified,
    Verify,
)
from services.verifier.engine import EngineStats

_CODE_TO_PB = {
    FailureCode.UNKNOWN_SESSION: pb.SessionFailed.CODE_UNKNOWN_SESSION,
    FailureCode.INVALID: pb.SessionFailed.CODE_INVALID,
    FailureCode.POISONED: pb.SessionFailed.CODE_POISONED,
    FailureCode.NO_CAPACITY: pb.SessionFailed.CODE_NO_CAPACITY,
    FailureCode.DRAINING: pb.SessionFailed.CODE_DRAINING,
    FailureCode.INTERNAL: pb.SessionFailed.CODE_INTERNAL,
    FailureCode.NO_MEMORY: pb.SessionFailed.CODE_NO_MEMORY,
}


def command_from_pb(message: pb.VerifyCommand) -> Command | None:
    """None for a heartbeat and for a command that this version does not know."""
    session_id = message.session_id
    match message.WhichOneof("command"):
        case "open":
            opening = message.open
            return Open(
                session_id,
                opening.request_id,
                tuple(opening.prompt_token_ids),
                convert.sampling_from_pb(opening.sampling),
                tuple(opening.output_token_ids),
                opening.cache_salt,
                opening.num_top_candidates,
                tuple(opening.inside_drafter_ids),
                opening.inside_width,
                opening.num_inside_tokens,
                opening.traceparent,
            )
        case "verify":
            verify = message.verify
            draft, num_inside_tokens = _draft_of(verify), verify.num_inside_tokens
            return Verify(session_id, verify.round_index, verify.base_length, draft, num_inside_tokens)
        case "finish":
            return Finish(session_id)
        case "abort":
            return Abort(session_id)
        case _:
            return None


def _draft_of(message: pb.VerifyDraft) -> Draft:
    """As it came, malformed or not: the desk refuses it in its turn among the session's commands."""
    token_ids, parents = tuple(message.draft_token_ids), tuple(message.parent_indices)
    return Draft(token_ids, parents) if parents else Draft.chain(token_ids)


def answer_to_pb(answer: Answer) -> pb.VerifyAnswer:
    match answer:
        case Opened(session_id, verification):
            return pb.VerifyAnswer(session_id=session_id, opened=convert.opened_to_pb(verification))
        case Verified(session_id, round_index, verification):
            verified = convert.verified_to_pb(verification, round_index)
            return pb.VerifyAnswer(session_id=session_id, verified=verified)
        case Failed(session_id, code, text, round_index):
            failed = pb.SessionFailed(code=_CODE_TO_PB[code], message=text, round_index=round_index)
            return pb.VerifyAnswer(session_id=session_id, failed=failed)


def heartbeat_to_pb(stats: EngineStats) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(
        heartbeat=pb.Heartbeat(
            step_counter=stats.step_counter,
            num_queued=stats.num_queued,
            num_sessions=stats.num_sessions,
            kv_cache_usage_ratio=stats.kv_cache_usage_ratio,
        )
    )


def drain_to_pb(grace_s: float) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(drain=pb.Drain(grace_ms=round(grace_s * 1000)))
