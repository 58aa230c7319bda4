"""The moment in which gRPC has a message: told once, on the way, and the write behaves as if nobody had asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc.aio
import pytest

from moot.rpc.link import Handed


def test_told_at_the_first_wait_and_once() -> None:
    """`note` is called when the write first waits, not when it ends; what the write returns from comes back."""

    async def main() -> None:
        noted: list[int] = []
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def write() -> None:
            await gate
            await asyncio.sleep(0)

        async def writer() -> None:
            await Handed(write(), lambda: noted.append(1))

        task = asyncio.create_task(writer())
        await asyncio.sleep(0)
        assert noted == [1]
        assert not task.done()
        gate.set_result(None)
        await task
        assert noted == [1]

    asyncio.run(main())


def test_a_write_that_never_waits_is_told_too() -> None:
    """Done at once is handed over as well."""

    async def main() -> None:
        noted: list[int] = []

        async def write() -> None:
            pass

        await Handed(write(), lambda: noted.append(1))
        assert noted == [1]

    asyncio.run(main())


def test_a_write_that_fails_is_not_told_and_raises() -> None:
    """What was not handed over is not counted as written."""

    async def main() -> None:
        noted: list[int] = []

        async def write() -> None:
            raise asyncio.InvalidStateError("the stream is over")

        with pytest.raises(asyncio.InvalidStateError):
            await Handed(write(), lambda: noted.append(1))
        assert noted == []

    asyncio.run(main())


def test_cancellation_reaches_the_write() -> None:
    """A cancelled writer cancels what it waits for, which can let go of what it holds."""

    async def main() -> None:
        ended: list[str] = []

        async def write() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def writer() -> None:
            await Handed(write(), lambda: None)

        task = asyncio.create_task(writer())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled"]

    asyncio.run(main())


class _Peer:
    """A gRPC server in a thread of its own; `came` is set when a message has come."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.port: Future[int] = Future()
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    def close(self) -> None:
        loop, stop = self._stop
        loop.call_soon_threadsafe(stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        async def take(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for _ in messages:
                self.came.set()
                yield b""

        handler = grpc.stream_stream_rpc_method_handler(take)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Take": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stop = asyncio.Event()
        self._stop = asyncio.get_running_loop(), stop
        self.port.set_result(port)
        await stop.wait()
        await server.stop(None)


def test_what_was_handed_over_arrives_though_the_loop_stands_still() -> None:
    """gRPC puts a message on the connection within the call that takes it: the metric's end of a turn rests on that."""
    peer = _Peer()

    async def main() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{peer.port.result(10)}") as channel:
            call = channel.stream_stream("/test/Take")()
            await call.write(b"first")
            await call.read()
            peer.came.clear()
            arrived: list[bool] = []
            await Handed(call.write(b"second"), lambda: arrived.append(peer.came.wait(10)))
            assert arrived == [True]
            call.cancel()

    try:
        asyncio.run(main())
    finally:
        peer.close()
