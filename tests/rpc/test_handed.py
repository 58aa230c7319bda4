"""The moment in which gRPC has a message: told once, on the way, and the write behaves as if nobody had asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import pytest

from moot.rpc.link import Handed


def written(write: Coroutine[Any, Any, None], noted: list[int]) -> asyncio.Task[None]:
    """A task that hands `write` over, and notes when it is told."""

    async def writer() -> None:
        await Handed(write, lambda: noted.append(1))

    return asyncio.create_task(writer())


async def test_told_at_the_first_wait_and_once() -> None:
    """`note` is called when the write first waits, not when it ends; what the write returns from comes back."""
    noted: list[int] = []
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write() -> None:
        await gate
        await asyncio.sleep(0)

    task = written(write(), noted)
    await asyncio.sleep(0)
    assert noted == [1]
    assert not task.done()
    gate.set_result(None)
    await task
    assert noted == [1]


@pytest.mark.parametrize(("error", "told"), [(None, [1]), (asyncio.InvalidStateError("the stream is over"), [])])
async def test_a_write_that_never_waits_is_told_unless_it_fails(error: Exception | None, told: list[int]) -> None:
    """Done at once is handed over as well; what fails was not, and is not counted as written."""
    noted: list[int] = []

    async def write() -> None:
        if error:
            raise error

    (result,) = await asyncio.gather(written(write(), noted), return_exceptions=True)
    assert result is error
    assert noted == told


async def test_cancellation_reaches_the_write() -> None:
    """A cancelled writer cancels what it waits for, which can let go of what it holds."""
    ended: list[str] = []

    async def write() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    task = written(write(), [])
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]


async def test_what_was_handed_over_arrives_though_the_loop_stands_still() -> None:
    """gRPC puts a message on the connection within the call that takes it: the metric's end of a turn rests on that."""
    came = threading.Event()

    def take(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in messages:
            came.set()
            yield b""

    handler = grpc.stream_stream_rpc_method_handler(take)
    # Served by threads: this loop will do nothing while it waits.
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Take": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/test/Take")()
            await call.write(b"first")
            await call.read()
            came.clear()
            arrived: list[bool] = []
            await Handed(call.write(b"second"), lambda: arrived.append(came.wait(10)))
            assert arrived == [True]
            call.cancel()
    finally:
        server.stop(None)
