"""Links: frames drain what is queued, sizes agree, errors become codes, pings end nothing, SIGTERM's event drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moot.core import errors
from moot.rpc.grpc_server import GrpcServer, run_until_terminated
from moot.rpc.interceptors import status_of
from moot.rpc.link import ITEM_OVERHEAD_BYTES, FrameQueue, FrameQueueFull, LinkConfig, open_channel
from moot.runtime.metrics import Metrics
from moot.runtime.process import PeerOptions
from moot.testing import InProcessServer
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc as pb_grpc
from tests.waiting import GIVE_UP_S, eventually

PINGS_S = 6.0


async def test_a_frame_takes_all_that_waits_up_to_its_size() -> None:
    """Many small items, few frames; nothing is lost at the end."""
    queue: FrameQueue[int] = FrameQueue(max_items=5, max_frame_items=3)
    waiting = asyncio.create_task(queue.next_frame())
    await asyncio.sleep(0)
    for item in range(5):
        queue.put(item)
    with pytest.raises(FrameQueueFull):
        queue.put(5)
    assert await waiting == [0, 1, 2]
    queue.close()
    queue.put(6)
    assert await queue.next_frame() == [3, 4]
    assert await queue.next_frame() == []


async def test_a_frame_holds_no_more_bytes_than_a_message() -> None:
    """C27: a frame is cut before the limit of a message, though each item fits; an item above it goes alone."""
    for items, frames in (("111", ["11", "1"]), ("0000011", ["0000", "01", "1"]), ("19111", ["1", "9", "11", "1"])):
        queue: FrameQueue[str] = FrameQueue(
            max_frame_bytes=4 * ITEM_OVERHEAD_BYTES, size_of=lambda item: int(item) * ITEM_OVERHEAD_BYTES
        )
        for item in items:
            queue.put(item)
        queue.close()
        assert ["".join(await queue.next_frame()) for _ in frames] == frames
        assert await queue.next_frame() == []


class Echo(pb_grpc.DrafterServiceServicer):
    """Answers each frame with its size, and fails on request."""

    async def Draft(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async for request in request_iterator:
            if request.commands[0].open.request_id == "bad":
                raise errors.InvalidRequest("top_k is wrong", "top_k")
            count = len(request.commands[0].open.prompt_token_ids)
            yield pb.DraftResponse(answers=[pb.DraftAnswer(session_id=count)])

    async def Describe(self, request, context):  # type: ignore[no-untyped-def]
        raise errors.NoCapacity("full", retry_after_s=3)


def echo(server: grpc.aio.Server) -> None:
    pb_grpc.add_DrafterServiceServicer_to_server(Echo(), server)


def frame(size: int, request_id: str = "") -> pb.DraftRequest:
    """A prompt of so many tokens, 5 bytes each."""
    opening = pb.OpenDraftSession(request_id=request_id, prompt_token_ids=[2**31] * size)
    return pb.DraftRequest(commands=[pb.DraftCommand(session_id=1, open=opening)])


async def test_large_frames_pass_and_larger_ones_fail_cleanly_and_errors_carry_codes(tmp_path: Path) -> None:
    """C27: both ends share one message size, well above gRPC's 4 MiB; above it the call fails with a status."""
    link = LinkConfig(max_message_bytes=8 * 1024 * 1024)
    server, metrics, terminated = GrpcServer(link, ("moot.v1.DrafterService",)), Metrics(), asyncio.Event()
    echo(server.server)
    drained = []

    async def drain() -> None:
        drained.append(True)

    ready = tmp_path / "ready.json"
    options = PeerOptions(port=0, metrics_port=0, ready_file=ready, drain_grace_s=5.0)
    life = asyncio.create_task(run_until_terminated(server, metrics, options, drain=drain, terminated=terminated))
    await eventually(lambda: ready.exists() or life.done())
    assert not life.done(), life.exception()
    facts = json.loads(ready.read_text())
    async with open_channel(f"127.0.0.1:{facts['port']}", link) as channel:
        stub = pb_grpc.DrafterServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=GIVE_UP_S)).status == 1

        watch = health.Watch(health_pb2.HealthCheckRequest(service="moot.v1.DrafterService"), timeout=GIVE_UP_S)
        assert (await watch.read()).status == 1
        watch.cancel()

        async def ask(request: pb.DraftRequest) -> int:
            return int((await anext(aiter(stub.Draft(iter([request]), timeout=GIVE_UP_S)))).answers[0].session_id)

        async def refused(call: Awaitable[object], code: grpc.StatusCode) -> tuple[tuple[str, str], ...]:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is code
            return tuple(error.value.trailing_metadata())

        assert await ask(frame(1_100_000)) == 1_100_000
        await refused(ask(frame(2_000_000)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert await ask(frame(3)) == 3
        invalid = await refused(ask(frame(1, "bad")), grpc.StatusCode.INVALID_ARGUMENT)
        assert ("moot-param", "top_k") in invalid
        full = await refused(stub.Describe(pb.DescribeDrafterRequest(), timeout=GIVE_UP_S), grpc.StatusCode.UNAVAILABLE)
        assert ("retry-after", "3") in full
    assert httpx.get(f"http://127.0.0.1:{facts['metrics_port']}/readyz", timeout=GIVE_UP_S).status_code == 200
    terminated.set()
    await asyncio.wait_for(life, GIVE_UP_S)
    assert drained == [True]


async def test_pings_that_come_in_bursts_end_no_connection() -> None:
    """Keepalive finds dead peers and ends no connection of a living one: who was held up (a busy node, a stopped
    process) receives pings closer together than it allows, and the idle stream lives on. (gRPC's default ends it at the
    third ping that came too early.)"""
    async with InProcessServer(echo, LinkConfig(keepalive_time_ms=20_000)) as server:
        hasty = LinkConfig(keepalive_time_ms=1000, keepalive_timeout_ms=20_000).channel_options()
        async with grpc.aio.insecure_channel(server.address, options=hasty) as channel:
            call = pb_grpc.DrafterServiceStub(channel).Draft()
            await call.write(frame(1))
            assert (await call.read()).answers[0].session_id == 1
            # Nothing is said meanwhile but pings, one a second.
            nothing = asyncio.ensure_future(call.read())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(nothing), PINGS_S)
            await call.write(frame(2))
            assert (await asyncio.wait_for(nothing, GIVE_UP_S)).answers[0].session_id == 2
            call.cancel()


def test_every_error_of_the_tree_has_a_status() -> None:
    """An error that a peer's caller can meet is never an anonymous INTERNAL."""
    assert status_of(errors.ContextLengthExceeded("too long")) == grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(errors.Draining("going")) == grpc.StatusCode.UNAVAILABLE
    assert status_of(errors.RateLimited("slow down")) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(errors.UnknownSession("gone")) == grpc.StatusCode.ABORTED
    assert status_of(errors.MootError("?")) == grpc.StatusCode.INTERNAL
