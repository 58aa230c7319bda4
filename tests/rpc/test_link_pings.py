"""Keepalive between pods must find dead peers, and must not end the connections of living ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from moot.rpc.link import LinkConfig
from moot.testing import InProcessServer
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc as pb_grpc
from tests.waiting import GIVE_UP_S

PINGS_S = 6.0


class _Echo(pb_grpc.DrafterServiceServicer):
    async def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DraftResponse]:
        async for _ in request_iterator:
            yield pb.DraftResponse(answers=[pb.DraftAnswer(session_id=1)])


def test_pings_that_come_in_bursts_end_no_connection() -> None:
    """A peer that was held up (a busy node, a stopped process) receives its pings closer together than it allows. That
    is no attack: the idle stream lives on. (gRPC's default ends it at the third ping that came too early.)"""

    async def main() -> None:
        async with InProcessServer(
            lambda server: pb_grpc.add_DrafterServiceServicer_to_server(_Echo(), server),
            LinkConfig(keepalive_time_ms=20_000),
        ) as server:
            hasty = LinkConfig(keepalive_time_ms=1000, keepalive_timeout_ms=20_000).channel_options()
            async with grpc.aio.insecure_channel(server.address, options=hasty) as channel:
                call = pb_grpc.DrafterServiceStub(channel).Draft()
                await call.write(pb.DraftRequest())
                assert (await call.read()).answers[0].session_id == 1
                # Nothing is said meanwhile but pings, one a second.
                nothing = asyncio.ensure_future(call.read())
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(nothing), PINGS_S)
                await call.write(pb.DraftRequest())
                assert (await asyncio.wait_for(nothing, GIVE_UP_S)).answers[0].session_id == 1
                call.cancel()

    asyncio.run(main())
