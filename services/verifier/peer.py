"""One peer's stream: frames of commands in, frames of answers out, and everything freed when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from moot.core.errors import NoCapacity
from moot.rpc.frames import FrameQueue, FrameQueueFull
from moot.v1 import verifier_service_pb2 as pb
from services.verifier import wire
from services.verifier.commands import Answer
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine


class PeerStream:
    """Lives on one event loop. `close` may be called more than once; after it nothing of the peer is left."""

    def __init__(self, engine: Engine, config: VerifierConfig) -> None:
        self._engine = engine
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._queue: FrameQueue[pb.VerifyAnswer] = FrameQueue(
            config.max_queued_answers,
            max_frame_bytes=config.max_message_bytes,
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
            if command := wire.command_from_pb(message):
                commands.append(command)
            elif message.HasField("heartbeat"):
                self.send(wire.heartbeat_to_pb(self._engine.stats))
        if commands:
            self._engine.submit(self._stream, commands)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            self.send(wire.heartbeat_to_pb(self._engine.stats))

    def _deliver(self, answers: Sequence[Answer]) -> None:
        """From any thread. Raises RuntimeError when the loop is closed."""
        self._loop.call_soon_threadsafe(self._send_all, answers)

    def _send_all(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.send(wire.answer_to_pb(answer))

    def _give_up(self, error: Exception) -> None:
        self._error = self._error or error
        self._queue.close()
