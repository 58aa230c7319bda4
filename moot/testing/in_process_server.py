"""A gRPC server inside the test's own process, on loopback, that can be killed and come back on its port.

A `ScriptedPeer` is such a server with streams of frames and sessions, served until either end leaves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import grpc.aio

from moot.rpc.interceptors import ErrorInterceptor
from moot.rpc.link import STREAM_ERRORS, FrameQueue, LinkConfig

SessionT = TypeVar("SessionT")
AnswerT = TypeVar("AnswerT")
CommandT = TypeVar("CommandT")
ResponseT = TypeVar("ResponseT")


class InProcessServer:
    """A gRPC server on loopback. `add`: registers the servicers, called anew at every start. An async context
    manager."""

    def __init__(self, add: Callable[[grpc.aio.Server], None], link: LinkConfig | None = None) -> None:
        self._add = add
        self._link = link or LinkConfig()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        server = grpc.aio.server(options=self._link.server_options(), interceptors=(ErrorInterceptor(),))
        self._add(server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def kill(self) -> None:
        """Die as a process does: every stream breaks at once."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()


@dataclass(slots=True, eq=False)
class ScriptedPeerStream(Generic[SessionT, AnswerT]):
    answers: FrameQueue[AnswerT] = field(default_factory=FrameQueue)
    sessions: dict[int, SessionT] = field(default_factory=dict)


class ScriptedPeer(InProcessServer, Generic[SessionT, CommandT, AnswerT]):
    """A server on loopback and its streams. A peer says what it does with a command: `take`.

    `counts`: commands seen by name, and `streams`.
    """

    def __init__(self, add: Callable[[grpc.aio.Server], None]) -> None:
        super().__init__(add)
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
