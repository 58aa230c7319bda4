"""Messages to commands and answers to messages: the drafter's own half of the wire."""

from __future__ import annotations

from moot.core.types import ModelInfo, Proposal
from moot.rpc import convert
from moot.v1 import drafter_service_pb2 as pb
from services.drafter.commands import Ahead, Answer, Close, Command, Open, Propose, Proposed


def command_from_pb(message: pb.DraftCommand) -> Command | None:
    """None for a command that this version does not know. Raises ValueError when malformed."""
    match message.WhichOneof("command"):
        case "open":
            opening = message.open
            prefix = (*opening.prompt_token_ids, *opening.output_token_ids)
            params = convert.sampling_from_pb(opening.sampling)
            return Open(message.session_id, opening.request_id, prefix, params)
        case "propose":
            ask = message.propose
            return Propose(
                message.session_id,
                ask.round_index,
                ask.base_length,
                tuple(ask.committed_token_ids),
                ask.num_speculative_tokens,
                ask.width,
                convert.top_candidates_from_pb(ask.top_candidates),
                ask.deadline_ms,
                ask.takes_ahead,
                ask.is_answered,
            )
        case "finish" | "abort":
            return Close(message.session_id)
        case _:
            return None


def answer_to_pb(answer: Answer, drafter_id: str) -> pb.DraftAnswer:
    if isinstance(answer, Ahead):
        path = convert.proposal_to_pb(Proposal(drafter_id, answer.path.token_ids, answer.path.confidences))
        ahead = pb.Ahead(round_index=answer.round_index, base_length=answer.base_length, path=path)
        return pb.DraftAnswer(session_id=answer.session_id, ahead=ahead)
    if not isinstance(answer, Proposed):
        unknown = pb.UnknownDraftSession(round_index=answer.round_index)
        return pb.DraftAnswer(session_id=answer.session_id, unknown_session=unknown)
    proposed = pb.Proposed(
        round_index=answer.round_index,
        base_length=answer.base_length,
        proposals=[
            convert.proposal_to_pb(Proposal(drafter_id, chain.token_ids, chain.confidences)) for chain in answer.chains
        ],
        drafted_ns=answer.drafted_ns,
    )
    return pb.DraftAnswer(session_id=answer.session_id, proposed=proposed)


def drain_to_pb(grace_s: float) -> pb.DraftAnswer:
    return pb.DraftAnswer(drain=pb.DrafterDrain(grace_ms=round(grace_s * 1000)))


def description_to_pb(kind: str, family: str, info: ModelInfo) -> pb.DescribeDrafterResponse:
    return pb.DescribeDrafterResponse(kind=kind, family=family, model=convert.model_info_to_pb(info))
