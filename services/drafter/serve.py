"""Wiring of a drafter: what its config names becomes a drafter, an engine and a server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from moot.core.errors import ConfigError
from moot.core.types import ModelInfo
from moot.drafters.interface import Drafter
from moot.drafters.registry import REQUEST_KINDS, create, load_kind
from moot.rpc.grpc_server import GrpcServer, run_until_terminated
from moot.rpc.tls import open_tls
from moot.runtime.metrics import Metrics
from moot.runtime.worker import WorkerThread
from moot.shipped import locate
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size
from moot.v1.drafter_service_pb2_grpc import add_DrafterServiceServicer_to_server
from services.drafter.config import DrafterConfig
from services.drafter.drafter_engine import DrafterEngine
from services.drafter.servicer import DrafterServicer, description_to_pb

SERVICE = "moot.v1.DrafterService"


def make_drafter_kind(config: DrafterConfig) -> tuple[Drafter[Any], ModelInfo]:
    """The drafter and what Describe says of it. Raises ConfigError or ModelRefused naming what is wrong.

    A kind without a model takes vocabulary and fingerprint from `tokenizer` (or the folder `model`), or goes without a
    fingerprint when the option `vocab_size` is given. A model's own tokenizer
    must be equal to `tokenizer` when that is named too.
    """
    if config.kind in REQUEST_KINDS:
        raise ConfigError(f"kind {config.kind} lives from what a request brings: the router runs it itself")
    options: dict[str, object] = dict(config.kind_options)
    tokenizer_path = config.tokenizer
    if any(option.name == "model" for option in dataclasses.fields(load_kind(config.kind).options)):
        options.setdefault("model", config.model)
        options.setdefault("num_threads", config.num_threads or None)
    else:
        tokenizer_path = tokenizer_path or config.model
    fingerprint, vocab_size = "", 0
    if tokenizer_path is not None:
        tokenizer = load_tokenizer(locate(tokenizer_path))
        fingerprint, vocab_size = tokenizer_fingerprint(tokenizer), vocabulary_size(tokenizer)
        options.setdefault("vocab_size", vocab_size)
    drafter = create(config.kind, options, fingerprint)
    info = drafter.model_info
    if info is None:
        vocab_size = vocab_size or int(str(options["vocab_size"]))
        return drafter, ModelInfo("", "", fingerprint, vocab_size, drafter.context_limit)
    return drafter, info


async def serve(
    config: DrafterConfig, make: Callable[[DrafterConfig], tuple[Drafter[Any], ModelInfo]] = make_drafter_kind
) -> None:
    """Serve until SIGTERM. `make` is called on the thread that drafts."""
    metrics = Metrics("drafter")
    tls = open_tls(config.tls, "drafter", metrics)
    worker = WorkerThread("drafter")
    drafter, info = await asyncio.wrap_future(worker.submit(lambda: make(config)))
    engine = DrafterEngine(drafter, config, metrics, info.vocab_size)
    description = description_to_pb(config.kind, drafter.family, info)
    drafter_id = config.drafter_id or config.kind
    metrics.drafter_info.labels(drafter_id, config.kind).set(1)
    servicer = DrafterServicer(
        engine, description, drafter_id, config.service.max_queued_answers, config.link.max_message_bytes
    )
    server = GrpcServer(config.link, [SERVICE], tls=tls)
    add_DrafterServiceServicer_to_server(servicer, server.server)
    engine.start(worker)
    try:
        await run_until_terminated(
            server,
            metrics,
            config.service,
            drain=lambda: servicer.drain(config.service.drain_grace_s),
            alive=lambda: engine.is_alive,
        )
    finally:
        await asyncio.to_thread(engine.stop)
