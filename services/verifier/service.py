"""Builds a verifier from its config and serves it until it is told to stop.

It also decides how many tokens of KV cache there is memory for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moot.core.errors import ConfigError
from moot.model.backend import choose_runner
from moot.model.cache.contiguous import PAGE_SLOTS, KvShape
from moot.model.loading.load import LoadedModel, load_model
from moot.model.runner import ModelRunner
from moot.rpc.grpc_server import GrpcServer, run_until_terminated, termination_event
from moot.rpc.tls import open_tls
from moot.runtime.metrics import Metrics
from moot.runtime.tracing import Tracing, open_tracing
from moot.runtime.worker import WorkerThread
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from services.verifier.servicer import VerifierServicer

_log = logging.getLogger("moot.verifier")

_CGROUP = Path("/sys/fs/cgroup")


def kv_capacity_tokens(config: VerifierConfig, shape: KvShape, context_limit: int) -> int:
    """Tokens of KV cache: as configured, else what the share of the free memory holds beside the prefix cache.

    Never more than `max_num_seqs` sessions of the longest kind can use. Raises ConfigError when not a page fits.
    """
    if config.kv_capacity_tokens:
        return config.kv_capacity_tokens
    budget = int(free_bytes(shape.device) * config.kv_memory_fraction)
    tokens = budget // shape.bytes_per_token - config.prefix_cache_tokens
    if tokens < PAGE_SLOTS:
        raise ConfigError(
            f"{budget >> 20} MiB hold {max(tokens, 0)} tokens of KV beside the prefix cache;"
            " raise --kv-memory-fraction or lower --prefix-cache-tokens"
        )
    longest = min(context_limit, config.max_model_len or context_limit)
    pages = -(-longest // PAGE_SLOTS) * config.max_num_seqs
    return min(tokens // PAGE_SLOTS, pages) * PAGE_SLOTS


def free_bytes(device: torch.device) -> int:
    """Memory that may still be used on `device`: of the GPU, or of the host and this container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    return available if limit is None or used is None else max(0, min(available, limit - used))


def _read_number(path: Path) -> int | None:
    """The number in a file, None where there is no such file or it says that there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


SERVICE = "moot.v1.VerifierService"


def make_runner(config: VerifierConfig) -> ModelRunner:
    """Load the target model. Raises ModelRefused, and ConfigError where batch-invariant mode is on and does not
    hold."""
    loaded = load_model(
        config.model,
        config.compute.device,
        config.compute.dtype,
        config.revision,
        config.compute.num_threads or None,
        native=config.native_kernels,
    )
    capacity = kv_capacity_tokens(config, loaded.kv_shape, loaded.info.context_limit)
    if config.batch_invariant != "auto":
        return choose_runner(loaded, capacity, config.batch_invariant == "on")
    return _automatic_runner(loaded, capacity)


def _automatic_runner(loaded: LoadedModel, capacity: int) -> ModelRunner:
    """A runner in batch-invariant mode on a CPU where that holds, else without it."""
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
    """The engine of a config. Same errors as make_runner. To be called on the thread that computes: see
    moot.runtime.worker."""
    engine = Engine(make_runner(config), config, metrics, on_death, tracing)
    facts = {"model": engine.info.model, "batch_invariant": engine.runner.batch_invariant}
    _log.info("model loaded", extra=facts)
    return engine


async def serve(config: VerifierConfig) -> int:
    """Serve until SIGTERM. Returns the exit status: 1 when the compute thread could not go on."""
    metrics, tracing = Metrics("verifier"), open_tracing("verifier")
    tls = open_tls(config.tls, "verifier", metrics)
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
            config.service,
            drain=servicer.drain,
            alive=lambda: engine.is_alive,
            terminated=terminated,
        )
    finally:
        await asyncio.to_thread(engine.stop)
        await asyncio.to_thread(tracing.close)
    return 1 if died else 0
