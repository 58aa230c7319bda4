"""VerifierService over an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from moot.rpc import convert
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from services.verifier import wire
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from services.verifier.peer import PeerStream

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
            peer.send(wire.drain_to_pb(self._config.drain_grace_s))
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
            deterministic=self._engine.runner.deterministic,
            drafters=[
                pb.InsideDrafter(drafter_id=one.drafter_id, kind=one.kind, family=one.family)
                for one in self._engine.serving.inside.drafters
            ],
        )

    async def drain(self) -> None:
        """Tell every peer to move, and wait until no session is left; the caller bounds the wait."""
        self._draining = True
        self._engine.drain()
        for peer in self._peers:
            peer.send(wire.drain_to_pb(self._config.drain_grace_s))
        while self._engine.stats.num_sessions:  # noqa: ASYNC110 - the count belongs to another thread
            await asyncio.sleep(DRAIN_POLL_S)
