"""Builds a verifier from its config and serves it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moot.core.errors import ConfigError
from moot.metrics import Metrics
from moot.model.backend import choose_runner
from moot.model.load import LoadedModel, load_model
from moot.model.runner import ModelRunner
from moot.rpc.server import GrpcServer, run_until_terminated, termination_event
from moot.rpc.tls import open_tls
from moot.tracing import Tracing, open_tracing
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from moot.worker import WorkerThread
from services.verifier.capacity import kv_capacity_tokens
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from services.verifier.servicer import VerifierServicer

_log = logging.getLogger("moot.verifier")

SERVICE = "moot.v1.VerifierService"


def make_runner(config: VerifierConfig) -> ModelRunner:
    """Load the target model. Raises ModelRefused, and ConfigError where deterministic mode is on and does not hold."""
    loaded = load_model(
        config.model,
        config.device,
        config.dtype,
        config.revision,
        config.num_threads or None,
        native=config.native_kernels,
    )
    capacity = kv_capacity_tokens(config, loaded.kv_shape, loaded.info.context_limit)
    if config.deterministic != "auto":
        return choose_runner(loaded, capacity, config.deterministic == "on")
    return _automatic_runner(loaded, capacity)


def _automatic_runner(loaded: LoadedModel, capacity: int) -> ModelRunner:
    """Deterministic on a CPU where it holds."""
    if loaded.kv_shape.device.type != "cpu":
        return choose_runner(loaded, capacity, False)
    try:
        return choose_runner(loaded, capacity, True)
    except ConfigError as error:
        _log.warning("natural mode: %s", error)
        return choose_runner(loaded, capacity, False)


def make_engine(
    config: VerifierConfig, metrics: Metrics, on_death: Callable[[], None], tracing: Tracing | None = None
) -> Engine:
    """Same errors as make_runner. To be called on the thread that computes: see moot.worker."""
    engine = Engine(make_runner(config), config, metrics, on_death, tracing)
    facts = {"model": engine.info.model, "deterministic": engine.runner.deterministic}
    _log.info("model loaded", extra=facts)
    return engine


async def serve(config: VerifierConfig) -> int:
    """Serve until SIGTERM. Returns the exit status: 1 when the compute thread could not go on."""
    metrics, tracing = Metrics("verifier"), open_tracing("verifier")
    tls = open_tls(config, "verifier", metrics)
    terminated, loop, died = termination_event(), asyncio.get_running_loop(), []

    def on_death() -> None:
        died.append(True)
        loop.call_soon_threadsafe(terminated.set)

    worker = WorkerThread("compute")
    engine = await asyncio.wrap_future(worker.submit(lambda: make_engine(config, metrics, on_death, tracing)))
    metrics.model_info.labels(engine.info.model).set(1)
    metrics.num_requests_limit.set(config.max_num_seqs + config.max_waiting_seqs)
    if config.vllm_metric_names:
        metrics.add_vllm_names(engine.info.model)
    servicer = VerifierServicer(engine, config)
    server = GrpcServer(config.link, (SERVICE,), tls=tls)
    pb_grpc.add_VerifierServiceServicer_to_server(servicer, server.server)
    engine.start(worker)
    try:
        await run_until_terminated(
            server,
            metrics,
            host=config.host,
            port=config.port,
            metrics_port=config.metrics_port,
            ready_file=config.ready_file,
            drain=servicer.drain,
            drain_grace_s=config.drain_grace_s,
            alive=lambda: engine.is_alive,
            terminated=terminated,
        )
    finally:
        await asyncio.to_thread(engine.stop)
        await asyncio.to_thread(tracing.close)
    return 1 if died else 0
