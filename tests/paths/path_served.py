"""A verifier and drafters as services on loopback, all in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from moot.core.types import ModelInfo
from moot.drafters.interface import Drafter
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import LinkConfig
from moot.runtime.metrics import Metrics
from moot.runtime.worker import WorkerThread
from moot.testing import Manner, ScriptedDrafter, ScriptedText
from moot.v1 import drafter_service_pb2_grpc, verifier_service_pb2_grpc
from services.drafter.config import DrafterConfig
from services.drafter.drafter_engine import DrafterEngine
from services.drafter.servicer import DrafterServicer, description_to_pb
from services.verifier.engine import Engine
from services.verifier.servicer import VerifierServicer

_MANNERS = (Manner.WRONG, Manner.DOUBLE, Manner.STALE, Manner.UNKNOWN, Manner.BAD_CONFIDENCES, Manner.ABSTAIN)


class _Served:
    """An engine behind a server on loopback. `start`: starts the engine."""

    def __init__(self, engine: Engine | DrafterEngine, link: LinkConfig, start: Callable[[], None]) -> None:
        self._engine = engine
        self._server = GrpcServer(link, ())
        self._start_engine = start

    async def start(self) -> None:
        self._start_engine()
        await self._server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        await self._server.stop(0)
        await asyncio.to_thread(self._engine.stop)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"


class ServedTarget(_Served):
    """A verifier with the drafters inside that `spec` names, small chunks and shared prompts, on loopback."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        super().__init__(engine, engine.config.link, engine.start)
        servicer = VerifierServicer(engine, engine.config)
        verifier_service_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, self._server.server)

    def left(self) -> dict[str, int]:
        """What is held of requests, by where."""
        engine, serving = self.engine, self.engine.serving
        return {
            "verifier sessions": engine.stats.num_sessions,
            "verifier commands": engine.stats.num_queued,
            "verifier cache tokens": engine.runner.pool.used_tokens,
            "scheduler": serving.scheduler.num_admitted + serving.scheduler.num_waiting,
            "gathering": len(serving.batching_delay),
            "drafters inside": sum(getattr(one, "num_sessions", 0) for one in serving.attached.drafters),
        }


class Pod(_Served):
    """A drafter as a service on loopback."""

    def __init__(self, config: DrafterConfig, make: Callable[[DrafterConfig], tuple[Drafter[Any], ModelInfo]]) -> None:
        worker = WorkerThread(config.drafter_id)
        self._drafter, info = worker.submit(lambda: make(config)).result(timeout=60)
        self.engine = DrafterEngine(self._drafter, config, Metrics("drafter"), info.vocab_size)
        super().__init__(self.engine, config.link, lambda: self.engine.start(worker))
        description = description_to_pb(self._drafter.kind, self._drafter.family, info)
        servicer = DrafterServicer(
            self.engine,
            description,
            config.drafter_id,
            config.service.max_queued_answers,
            config.link.max_message_bytes,
        )
        drafter_service_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, self._server.server)

    def left(self) -> dict[str, int]:
        return {"sessions": self.engine.num_sessions, "cache tokens": getattr(self._drafter, "kv_used_tokens", 0)}


class ProtocolPod(ScriptedDrafter):
    """A drafter that answers twice, to other rounds, or not at all, forgets sessions and miscounts confidences."""

    def __init__(self, info: ModelInfo) -> None:
        draw = random.Random("protocol")
        text = ScriptedText(vocab_size=info.vocab_size, end_token_id=min(info.end_token_ids))
        super().__init__(
            text,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            manner=lambda: draw.choice(_MANNERS),
            family="protocol",
        )

    async def stop(self) -> None:
        await self.kill()

    def left(self) -> dict[str, int]:
        return {"sessions": self.num_sessions}
