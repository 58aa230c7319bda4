"""The gRPC servicer of a drafter: streams in, engine, streams out.

It turns messages into commands and answers into messages: the drafter's own half of the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc.aio

from moot.core.errors import InvalidRequest
from moot.core.types import ModelInfo
from moot.rpc import convert
from moot.rpc.link import FrameQueue, FrameQueueFull
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc as pb_grpc
from services.drafter.drafter_commands import Ahead, Answer, Close, Command, OpenSession, Propose, Proposed
from services.drafter.drafter_engine import DrafterEngine


def command_from_pb(message: pb.DraftCommand) -> Command | None:
    """The command in a message, None for one that this version does not know. Raises ValueError when malformed."""
    match message.WhichOneof("command"):
        case "open":
            opening = message.open
            prefix = (*opening.prompt_token_ids, *opening.output_token_ids)
            params = convert.sampling_from_pb(opening.sampling)
            return OpenSession(message.session_id, opening.request_id, prefix, params)
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
        path = convert.proposal_to_pb(answer.path, drafter_id)
        ahead = pb.Ahead(round_index=answer.round_index, base_length=answer.base_length, path=path)
        return pb.DraftAnswer(session_id=answer.session_id, ahead=ahead)
    if not isinstance(answer, Proposed):
        unknown = pb.UnknownDraftSession(round_index=answer.round_index)
        return pb.DraftAnswer(session_id=answer.session_id, unknown_session=unknown)
    proposed = pb.Proposed(
        round_index=answer.round_index,
        base_length=answer.base_length,
        proposals=[convert.proposal_to_pb(proposal, drafter_id) for proposal in answer.proposals],
        drafted_ns=answer.drafted_ns,
    )
    return pb.DraftAnswer(session_id=answer.session_id, proposed=proposed)


def description_to_pb(kind: str, family: str, info: ModelInfo) -> pb.DescribeDrafterResponse:
    return pb.DescribeDrafterResponse(kind=kind, family=family, model=convert.model_info_to_pb(info))


class DraftStream:
    """One peer's stream. `deliver` may be called from any thread; what does not fit any more ends the stream."""

    def __init__(self, drafter_id: str, max_queued_answers: int, max_message_bytes: int) -> None:
        self.answers: FrameQueue[pb.DraftAnswer] = FrameQueue(
            max_queued_answers, max_frame_bytes=max_message_bytes, size_of=lambda answer: answer.ByteSize()
        )
        self.overflowed = False
        self._drafter_id = drafter_id
        self._loop = asyncio.get_running_loop()

    def deliver(self, answers: Sequence[Answer]) -> None:
        messages = [answer_to_pb(answer, self._drafter_id) for answer in answers]
        try:
            self._loop.call_soon_threadsafe(self.put, messages)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody reads any more.
            self.answers.close()

    def put(self, messages: Sequence[pb.DraftAnswer]) -> None:
        try:
            for message in messages:
                self.answers.put(message)
        except FrameQueueFull:
            self.overflowed = True
            self.answers.close()


class DrafterServicer(pb_grpc.DrafterServiceServicer):
    def __init__(
        self,
        engine: DrafterEngine,
        description: pb.DescribeDrafterResponse,
        drafter_id: str,
        max_queued_answers: int,
        max_message_bytes: int,
    ) -> None:
        self._engine = engine
        self._description = description
        self._new_stream = partial(DraftStream, drafter_id, max_queued_answers, max_message_bytes)
        self._streams: set[DraftStream] = set()
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._drain_message: pb.DraftAnswer | None = None

    async def Describe(
        self, request: pb.DescribeDrafterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeDrafterResponse:
        return self._description

    async def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DraftResponse]:
        stream = self._enter()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while frame := await stream.answers.next_frame():
                yield pb.DraftResponse(answers=frame)
            await self._finish_reading(reader, stream)
        finally:
            # However the stream ends, what its sessions hold is freed.
            reader.cancel()
            self._leave(stream)

    async def drain(self, grace_s: float) -> None:
        """Tell all peers to go elsewhere, later ones included, and wait until all have gone."""
        self._drain_message = pb.DraftAnswer(drain=pb.DrafterDrain(grace_ms=round(grace_s * 1000)))
        for stream in self._streams:
            stream.put([self._drain_message])
        await self._no_streams.wait()

    async def _read(self, request_iterator: AsyncIterator[pb.DraftRequest], stream: DraftStream) -> None:
        try:
            async for request in request_iterator:
                self._engine.submit(stream, _commands(request))
        finally:
            stream.answers.close()

    async def _finish_reading(self, reader: asyncio.Task[None], stream: DraftStream) -> None:
        """Raises what ended the stream, if it was not its peer."""
        if stream.overflowed:
            raise InvalidRequest("the peer does not read its answers")
        await reader

    def _enter(self) -> DraftStream:
        stream = self._new_stream()
        self._streams.add(stream)
        self._no_streams.clear()
        if self._drain_message is not None:
            stream.put([self._drain_message])
        return stream

    def _leave(self, stream: DraftStream) -> None:
        stream.answers.close()
        self._engine.end(stream)
        self._streams.discard(stream)
        if not self._streams:
            self._no_streams.set()


def _commands(request: pb.DraftRequest) -> list[Command]:
    try:
        found = [command_from_pb(message) for message in request.commands]
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return [command for command in found if command is not None]
