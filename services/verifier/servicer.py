"""The gRPC servicer of a verifier: VerifierService over an engine.

It turns frames into commands and answers into frames: the verifier's own half of the wire. `PeerStream` is one peer's
stream: frames of commands in, frames of answers out, and everything freed when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from moot.core.errors import NoCapacity
from moot.core.types import Draft
from moot.rpc import convert
from moot.rpc.link import FrameQueue, FrameQueueFull
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from services.verifier.commands import (
    Abort,
    Answer,
    Command,
    Failed,
    Finish,
    Open,
    Opened,
    Verified,
    Verify,
)
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine, EngineStats


def command_from_pb(message: pb.VerifyCommand) -> Command | None:
    """The command in a message, None for a heartbeat and for a command that this version does not know."""
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
    """The draft as it came, malformed or not: admission refuses it in its turn among the session's commands."""
    token_ids, parents = tuple(message.draft_token_ids), tuple(message.parent_indices)
    return Draft(token_ids, parents) if parents else Draft.chain(token_ids)


def answer_to_pb(answer: Answer) -> pb.VerifyAnswer:
    match answer:
        case Opened(session_id, verification):
            return pb.VerifyAnswer(session_id=session_id, opened=convert.opened_to_pb(verification))
        case Verified(session_id, round_index, verification):
            verified = convert.verified_to_pb(verification, round_index)
            return pb.VerifyAnswer(session_id=session_id, verified=verified)
        case Failed(session_id, error, text, round_index):
            failed = convert.failed_to_pb(error, text, round_index)
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


class PeerStream:
    """One peer's stream, on one event loop. `close` may be called more than once; after it nothing of the peer is
    left."""

    def __init__(self, engine: Engine, config: VerifierConfig) -> None:
        self._engine = engine
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._queue: FrameQueue[pb.VerifyAnswer] = FrameQueue(
            config.service.max_queued_answers,
            max_frame_bytes=config.link.max_message_bytes,
            size_of=lambda answer: answer.ByteSize(),
        )
        self._stream = engine.connect(self._deliver)
        self._error: Exception | None = None
        self._closed = False

    async def frames(self, requests: AsyncIterator[pb.VerifyRequest]) -> AsyncIterator[pb.VerifyResponse]:
        """Answers until the peer ends its stream. Raises what ended it otherwise: NoCapacity for a peer that floods or
        does not read."""
        tasks = [asyncio.create_task(self._read(requests)), asyncio.create_task(self._beat())]
        try:
            while answers := await self._queue.next_frame():
                yield pb.VerifyResponse(answers=answers)
            if self._error is not None:
                raise self._error
        finally:
            self.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, answer: pb.VerifyAnswer) -> None:
        try:
            self._queue.put(answer)
        except FrameQueueFull as error:
            self._give_up(NoCapacity(str(error)))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.disconnect(self._stream)
            self._queue.close()

    async def _read(self, requests: AsyncIterator[pb.VerifyRequest]) -> None:
        try:
            async for request in requests:
                self._receive(request)
        except Exception as error:  # noqa: BLE001 - raised again by `frames`, whose stream it ends
            self._give_up(error)
        finally:
            self._queue.close()

    def _receive(self, request: pb.VerifyRequest) -> None:
        commands = []
        for message in request.commands:
            if command := command_from_pb(message):
                commands.append(command)
            elif message.HasField("heartbeat"):
                self.send(heartbeat_to_pb(self._engine.stats))
        if commands:
            self._engine.submit(self._stream, commands)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            self.send(heartbeat_to_pb(self._engine.stats))

    def _deliver(self, answers: Sequence[Answer]) -> None:
        """Deliver answers, from any thread. Raises RuntimeError when the loop is closed."""
        self._loop.call_soon_threadsafe(self._send_all, answers)

    def _send_all(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.send(answer_to_pb(answer))

    def _give_up(self, error: Exception) -> None:
        self._error = self._error or error
        self._queue.close()


DRAIN_POLL_S = 0.05

Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(pb_grpc.VerifierServiceServicer):
    def __init__(self, engine: Engine, config: VerifierConfig) -> None:
        self._engine = engine
        self._config = config
        self._peers: set[PeerStream] = set()
        self._draining = False

    async def Verify(  # type: ignore[override]  # the generated base is for synchronous servers
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: Context
    ) -> AsyncIterator[pb.VerifyResponse]:
        peer = PeerStream(self._engine, self._config)
        self._peers.add(peer)
        # A cancelled call may leave the generator suspended at its yield: freeing does not wait for that.
        context.add_done_callback(lambda _: peer.close())  # type: ignore[arg-type]  # the stubs want a keyword name
        if self._draining:
            peer.send(drain_to_pb(self._config.service.drain_grace_s))
        try:
            async for frame in peer.frames(request_iterator):
                yield frame
        finally:
            peer.close()
            self._peers.discard(peer)

    async def Describe(  # type: ignore[override]
        self, request: pb.DescribeVerifierRequest, context: Context
    ) -> pb.DescribeVerifierResponse:
        return pb.DescribeVerifierResponse(
            model=convert.model_info_to_pb(self._engine.info),
            kv_capacity_tokens=self._engine.runner.pool.capacity_tokens,
            numerics_fingerprint=self._engine.runner.numerics_fingerprint,
            max_num_seqs=self._config.max_num_seqs,
            max_waiting_seqs=self._config.max_waiting_seqs,
            max_draft_tokens=self._config.max_draft_tokens,
            deterministic=self._engine.runner.batch_invariant,
            drafters=[
                pb.InsideDrafter(drafter_id=one.drafter_id, kind=one.kind, family=one.family)
                for one in self._engine.serving.attached.drafters
            ],
        )

    async def drain(self) -> None:
        """Tell every peer to move, and wait until no session is left; the caller bounds the wait."""
        self._draining = True
        self._engine.drain()
        for peer in self._peers:
            peer.send(drain_to_pb(self._config.service.drain_grace_s))
        while self._engine.stats.num_sessions:  # noqa: ASYNC110 - the count belongs to another thread
            await asyncio.sleep(DRAIN_POLL_S)
