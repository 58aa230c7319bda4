"""The base of scripted peers: streams of frames with sessions, served until either end leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc.aio

from moot.rpc.link import STREAM_ERRORS, FrameQueue, LinkConfig
from moot.testing.in_process_server import InProcessServer

SessionT = TypeVar("SessionT")
AnswerT = TypeVar("AnswerT")
CommandT = TypeVar("CommandT")
ResponseT = TypeVar("ResponseT")


@dataclass(slots=True, eq=False)
class ScriptedPeerStream(Generic[SessionT, AnswerT]):
    answers: FrameQueue[AnswerT] = field(default_factory=FrameQueue)
    sessions: dict[int, SessionT] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class ScriptedPeer(InProcessServer, Generic[SessionT, CommandT, AnswerT]):
    """A server on loopback and its streams. A peer says what it does with a command: `take`.

    `counts`: commands seen by name, and `streams`.
    """

    def __init__(self, add: Callable[[grpc.aio.Server], None], link: LinkConfig | None) -> None:
        super().__init__(add, link)
        self.counts: Counter[str] = Counter()
        self._streams: set[ScriptedPeerStream[SessionT, AnswerT]] = set()

    @property
    def num_sessions(self) -> int:
        return sum(len(stream.sessions) for stream in self._streams)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def take(self, stream: ScriptedPeerStream[SessionT, AnswerT], command: CommandT) -> None:
        """Take one command off the wire."""
        raise NotImplementedError

    def enter(self, stream: ScriptedPeerStream[SessionT, AnswerT]) -> None:
        self._streams.add(stream)
        self.counts["streams"] += 1

    def leave(self, stream: ScriptedPeerStream[SessionT, AnswerT]) -> None:
        self._streams.discard(stream)
        stream.sessions.clear()
        stream.answers.close()
        for task in stream.tasks:
            task.cancel()

    async def serve(
        self, request_iterator: AsyncIterator[Any], response: Callable[[Sequence[AnswerT]], ResponseT]
    ) -> AsyncIterator[ResponseT]:
        """Serve one stream from its beginning to its end; `response` makes a frame of answers."""
        stream: ScriptedPeerStream[SessionT, AnswerT] = ScriptedPeerStream()
        self.enter(stream)

        async def read() -> None:
            try:
                async for request in request_iterator:
                    for command in request.commands:
                        self.take(stream, command)
            except STREAM_ERRORS:
                pass  # the peer is gone, which the end of the answers shows as well
            finally:
                stream.answers.close()

        reader = asyncio.create_task(read())
        try:
            while answers := await stream.answers.next_frame():
                yield response(answers)
        finally:
            reader.cancel()
            self.leave(stream)
