"""A real drafter server on loopback and a peer that talks to it as a router does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from moot.core.types import SamplingParams
from moot.drafters.interface import Drafter
from moot.rpc import convert
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import open_channel
from moot.runtime.metrics import Metrics
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc as pb_grpc
from services.drafter.config import DrafterConfig
from services.drafter.drafter_engine import DrafterEngine
from services.drafter.serve import SERVICE, make_drafter_kind
from services.drafter.servicer import DrafterServicer, description_to_pb
from tests.waiting import GIVE_UP_S

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def open_command(
    session_id: int,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    request: str = "",
) -> pb.DraftCommand:
    opening = pb.OpenDraftSession(
        request_id=request,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=convert.sampling_to_pb(params),
    )
    return pb.DraftCommand(session_id=session_id, open=opening)


def propose_command(
    session_id: int, base_length: int, committed: Sequence[int] = (), num_tokens: int = 4, width: int = 1, **fields: Any
) -> pb.DraftCommand:
    propose = pb.Propose(
        base_length=base_length,
        committed_token_ids=committed,
        num_speculative_tokens=num_tokens,
        width=width,
        **fields,
    )
    return pb.DraftCommand(session_id=session_id, propose=propose)


def finish_command(session_id: int) -> pb.DraftCommand:
    return pb.DraftCommand(session_id=session_id, finish=pb.FinishDraftSession())


class Peer:
    """One bidirectional stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = pb_grpc.DrafterServiceStub(channel)
        self.call: Any = self.stub.Draft()
        self._answers: list[pb.DraftAnswer] = []

    async def send(self, *commands: pb.DraftCommand) -> None:
        await self.call.write(pb.DraftRequest(commands=commands))

    async def answer(self) -> pb.DraftAnswer:
        while not self._answers:
            response = await asyncio.wait_for(self.call.read(), GIVE_UP_S)
            assert response is not grpc.aio.EOF, "the stream has ended"
            self._answers += response.answers
        return self._answers.pop(0)

    async def ask(self, *commands: pb.DraftCommand) -> pb.DraftAnswer:
        await self.send(*commands)
        return await self.answer()

    async def ids(self, *commands: pb.DraftCommand) -> list[list[int]]:
        """The ids of each proposal of the one answer to these commands."""
        answer = await self.ask(*commands)
        assert answer.WhichOneof("answer") == "proposed", answer
        return [list(proposal.token_ids) for proposal in answer.proposed.proposals]


class RunningDrafter:
    def __init__(self, config: DrafterConfig, kind: Drafter[Any] | None, clock: Callable[[], float]) -> None:
        made, info = make_drafter_kind(config)
        self.metrics = Metrics()
        self.drafter = kind or made
        self.engine = DrafterEngine(self.drafter, config, self.metrics, info.vocab_size, clock)
        self.server = GrpcServer(config.link, [SERVICE])
        description = description_to_pb(config.kind, self.drafter.family, info)
        self.servicer = DrafterServicer(
            self.engine,
            description,
            config.drafter_id or config.kind,
            config.service.max_queued_answers,
            config.link.max_message_bytes,
        )
        pb_grpc.add_DrafterServiceServicer_to_server(self.servicer, self.server.server)
        self.config = config
        self.channel: grpc.aio.Channel

    def peer(self) -> Peer:
        return Peer(self.channel)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running(
    config: DrafterConfig, drafter: Drafter[Any] | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[RunningDrafter]:
    one = RunningDrafter(config, drafter, clock)
    one.engine.start()
    try:
        await one.server.start("127.0.0.1", 0)
        async with open_channel(f"127.0.0.1:{one.server.port}", config.link) as channel:
            one.channel = channel
            yield one
    finally:
        await one.server.stop(0)
        await asyncio.to_thread(one.engine.stop)
