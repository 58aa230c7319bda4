"""A real drafter server on loopback, kinds that tests look into, and a peer that talks to it as a router does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from moot.core.options import make_config
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.drafters.registry import create
from moot.rpc import convert
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import open_channel
from moot.runtime.metrics import Metrics
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc as pb_grpc
from services.drafter.config import DrafterConfig
from services.drafter.drafter_engine import DrafterEngine
from services.drafter.drafter_sessions import DrafterSession
from services.drafter.serve import SERVICE, make_drafter_kind
from services.drafter.servicer import DrafterServicer, description_to_pb
from tests.waiting import GIVE_UP_S

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NEURAL = ("dtype=float64", "device=cpu", "batch_invariant=true")


def settings(kind: str = "prompt_lookup", option: tuple[str, ...] = ("vocab_size=50",), **fields: Any) -> DrafterConfig:
    return make_config(DrafterConfig, kind=kind, option=option, **fields)


def neural(folder: Path, *option: str, **fields: Any) -> DrafterConfig:
    return settings("neural", (*NEURAL, *option), model=str(folder), num_threads=1, **fields)


def draft_model(folder: Path) -> Drafter[Any]:
    """What `neural` serves, without the service around it."""
    options = {"dtype": "float64", "device": "cpu", "batch_invariant": True, "num_threads": 1}
    return create("neural", {"model": folder, **options})


def own(kind: Drafter[Any], prefix: Sequence[int], count: int) -> list[int]:
    """What `kind` says after `prefix`."""
    session = kind.open(prefix, GREEDY)
    ((chain,),) = kind.propose([Ask(session, count)])
    kind.close(session)
    return list(chain.token_ids)


def chain(ids: Sequence[int]) -> Proposal:
    return Proposal(tuple(ids), tuple(range(len(ids))))


class Watched(Drafter[list[int]]):
    """A kind whose sessions are their prefixes; each `propose` waits until it is let go, and repeats the last id."""

    kind = "watched"
    family = "watched"
    context_limit = 1000

    def __init__(self, num_free: int = 0) -> None:
        """`num_free`: calls that need not wait."""
        self.calls: list[list[tuple[int, bool]]] = []
        """First id and whether ahead, of each ask of each call."""
        self.closed: list[list[int]] = []
        self.fails = False
        self.go = threading.Semaphore(num_free)

    def open(self, prefix: Sequence[int], params: SamplingParams) -> list[int]:
        return list(prefix)

    def extend(
        self, session: list[int], token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        session += token_ids

    def propose(self, asks: Sequence[Ask[list[int]]]) -> list[list[Proposal]]:
        self.calls.append([(ask.session[0], ask.is_ahead) for ask in asks])
        assert self.go.acquire(timeout=GIVE_UP_S)
        if self.fails:
            raise RuntimeError("a defect of this kind")
        return [[chain([ask.session[-1]] * ask.num_speculative_tokens)] for ask in asks]

    def close(self, session: list[int]) -> None:
        self.closed.append(session)


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

    async def said(self, *commands: pb.DraftCommand) -> str | None:
        """Which kind of answer comes to these commands."""
        return (await self.ask(*commands)).WhichOneof("answer")

    async def status(self) -> grpc.StatusCode:
        """How the stream ends."""
        return await asyncio.wait_for(self.call.code(), GIVE_UP_S)  # type: ignore[no-any-return]

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

    def session(self) -> DrafterSession:
        """The only one."""
        (session,) = list(self.engine._table)
        return session

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running(
    config: DrafterConfig, drafter: Drafter[Any] | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[RunningDrafter, Peer]]:
    """A drafter, and the first of its peers."""
    one = RunningDrafter(config, drafter, clock)
    one.engine.start()
    try:
        await one.server.start("127.0.0.1", 0)
        async with open_channel(f"127.0.0.1:{one.server.port}", config.link) as channel:
            one.channel = channel
            yield one, one.peer()
    finally:
        await one.server.stop(0)
        await asyncio.to_thread(one.engine.stop)
