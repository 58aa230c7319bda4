"""The HTTP front and the gRPC front of the rounds of a rig, and how tests call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest

from moot.rpc.link import LinkConfig
from moot.testing import InProcessServer, byte_tokenizer
from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from services.router.api.auth import ApiKeys
from services.router.api.choices import Front
from services.router.api.grpc import RouterServicer
from services.router.api.http.app import create_app
from services.router.api.settings import HttpSettings
from tests.services.router.api.http_fakes import StaticFrontState
from tests.services.router.generation.rounds_rig import Rig
from tests.waiting import GIVE_UP_S

TOKENIZER = byte_tokenizer()


@dataclass
class Fronts:
    """`client` calls the HTTP front in this process; `stub` the gRPC front over loopback, at `address`."""

    router: Rig
    front: Front
    state: StaticFrontState
    address: str
    stub: Any
    client: httpx.AsyncClient

    async def post(self, body: Any, path: str = "/v1/completions") -> httpx.Response:
        return await self.client.post(path, json=body)

    async def call(self, key: str | None = None, **fields: Any) -> list[pb.GenerateResponse]:
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        call = self.stub.Generate(pb.GenerateRequest(**fields), metadata=metadata, timeout=GIVE_UP_S)
        return [response async for response in call]

    async def refused(self, key: str | None = None, **fields: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(key, **fields)
        return caught.value


@asynccontextmanager
async def fronts(router: Rig, keys: ApiKeys | None = None, **settings: Any) -> AsyncIterator[Fronts]:
    state = StaticFrontState(router.targets.info, drafters=router.drafter_set.drafter_ids)
    http = HttpSettings(served_model_names=("scripted",), **settings)
    app = create_app(router.rounds, TOKENIZER, http, state=state, metrics=router.metrics, api_keys=keys)
    servicer = RouterServicer(app.state.front, keys or ApiKeys())
    server = InProcessServer(
        lambda grpc_server: router_service_pb2_grpc.add_RouterServiceServicer_to_server(servicer, grpc_server)
    )
    transport = httpx.ASGITransport(app)
    async with (
        server,
        grpc.aio.insecure_channel(server.address, LinkConfig().channel_options()) as channel,
        httpx.AsyncClient(transport=transport, base_url="http://router", timeout=GIVE_UP_S) as client,
    ):
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        yield Fronts(router, app.state.front, state, server.address, stub, client)
        app.state.front.tokenizer.close()
