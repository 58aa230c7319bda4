"""Several router processes behind one HTTP and one gRPC port: started, watched, replaced and ended as one.

Every worker is a whole router and listens on the same ports; the system hands each new connection to one of them
(SO_REUSEPORT). They share the record store and the peers as replicas of a deployment do, so that a request of a worker
that died is taken up from its record like any other, and limits are of one worker. The parent serves nothing but the
metrics port: every worker's metrics with a label `worker`, and probes that ask the workers.

The metrics of several workers as one exposition: every sample once per worker, told apart by a label.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from moot.core.errors import MootError
from moot.rpc.server import write_ready_file
from moot.runtime.admin import AdminServer
from moot.runtime.supervisor import tied_to_this_process
from services.router.api.http.server import bind
from services.router.config import RouterConfig

_log = logging.getLogger("moot.router.workers")

_TIMEOUT_S = 2.0


class WorkerMetrics(Collector):
    """`addresses()`: base URL of the metrics of each worker that serves, by its name.

    A worker that does not answer in time is left out of this scrape.
    """

    def __init__(self, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._addresses = addresses
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """All workers' metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # so that registering asks no worker

    def collect(self) -> list[Metric]:
        addresses = self._addresses()
        if not addresses:
            return []
        with ThreadPoolExecutor(len(addresses)) as threads:
            texts = threads.map(_scrape, addresses.values())
        return merged(dict(zip(addresses, texts, strict=True)))


def merged(texts: Mapping[str, str]) -> list[Metric]:
    """Families of all expositions, each sample with the label `worker`: whose text it stood in."""
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in family.samples]
    return list(families.values())


def _scrape(address: str) -> str:
    try:
        with urllib.request.urlopen(f"{address}/metrics", timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError as error:
        _log.warning("a worker's metrics are missing", extra={"cause": type(error).__name__})
        return ""


_POLL_S = 0.1
_PROBE_TIMEOUT_S = 1.0
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.5, 30.0
_STEADY_S = 60.0
"""A worker that has served for so long is replaced at once when it ends."""
_LAST_WORDS_S = 10.0
"""Of a worker after its own drain."""


class WorkerFailed(MootError):
    """A worker could not even start; what kept it from it stands above in the log."""


@dataclass(slots=True)
class Worker:
    """One process. `metrics_port` is 0 until it serves."""

    index: int
    ready_file: Path
    process: subprocess.Popen[bytes] | None = None
    metrics_port: int = 0
    ready_at: float = 0.0
    start_at: float = 0.0
    num_failures: int = 0


@dataclass(slots=True)
class Workers:
    """`argv`: the flags that the parent was started with, which its workers get too."""

    config: RouterConfig
    argv: Sequence[str]
    folder: Path
    ports: tuple[int, int]
    """HTTP and gRPC, as bound."""
    workers: list[Worker] = field(default_factory=list)
    have_served: bool = False
    """Whether all have been ready once."""

    def start(self) -> None:
        for index in range(self.config.workers):
            worker = Worker(index, self.folder / f"worker-{index}.ready")
            self.workers.append(worker)
            self._start(worker)

    def tend(self, now: float) -> None:
        """Take note of who serves and who has ended. Raises WorkerFailed when one ends before all have served once."""
        for worker in self.workers:
            if worker.process is None:
                if now >= worker.start_at:
                    self._start(worker)
            elif (status := worker.process.poll()) is not None:
                self._ended(worker, status, now)
            elif not worker.metrics_port and worker.ready_file.exists():
                worker.metrics_port = int(json.loads(worker.ready_file.read_text())["metrics_port"])
                worker.ready_at = now

    @property
    def all_serve(self) -> bool:
        return all(worker.metrics_port for worker in self.workers)

    def stop(self) -> None:
        """Every worker drains, all at once; those that do not end after it are killed."""
        running = [worker.process for worker in self.workers if worker.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.config.service.drain_grace_s + _LAST_WORDS_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.error("worker killed", extra={"worker_pid": process.pid})
                process.kill()
                process.wait()

    def addresses(self) -> dict[str, str]:
        """Of the metrics ports of those that serve, by the worker's number."""
        host = self.config.service.host
        host = host if host not in ("", "0.0.0.0") else "127.0.0.1"
        host = f"[{host if host != '::' else '::1'}]" if ":" in host else host
        serving = [worker for worker in list(self.workers) if worker.metrics_port]
        return {str(worker.index): f"http://{host}:{worker.metrics_port}" for worker in serving}

    def any_says_yes(self, path: str) -> bool:
        return any(_says_yes(address + path) for address in self.addresses().values())

    def _start(self, worker: Worker) -> None:
        worker.ready_file.unlink(missing_ok=True)
        worker.metrics_port = 0
        http_port, grpc_port = self.ports
        own = {
            "--workers": "1",
            "--reuse-port": "true",
            "--port": str(http_port),
            "--grpc-port": str(grpc_port),
            "--metrics-port": "0",
            "--ready-file": str(worker.ready_file),
        }
        flags = [part for pair in own.items() for part in pair]
        command = tied_to_this_process([sys.executable, "-m", "services.router", *self.argv, *flags])
        # A session of its own: Ctrl-C is for the parent, which lets the workers drain.
        worker.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        _log.info("worker started", extra={"worker": worker.index, "worker_pid": worker.process.pid})

    def _ended(self, worker: Worker, status: int, now: float) -> None:
        if not self.have_served:
            raise WorkerFailed(f"worker {worker.index} ended with status {status} before it served")
        steady = worker.metrics_port and now - worker.ready_at >= _STEADY_S
        worker.num_failures = 0 if steady else worker.num_failures + 1
        pause = 0.0 if steady else min(_BACKOFF_MIN_S * 2.0 ** min(worker.num_failures - 1, 16), _BACKOFF_MAX_S)
        worker.process, worker.metrics_port, worker.start_at = None, 0, now + pause
        _log.error("worker ended", extra={"worker": worker.index, "status": status, "restart_s": pause})


def serve_workers(config: RouterConfig, argv: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError for ports that cannot be had, and WorkerFailed."""
    stop = _stop_signal()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moot-router-")))
        held = [stack.enter_context(_hold(config.service.host, port)) for port in (config.port, config.grpc_port)]
        http_port, grpc_port = (int(one.getsockname()[1]) for one in held)
        workers = Workers(config, argv, folder, (http_port, grpc_port))
        admin = AdminServer(
            WorkerMetrics(workers.addresses),
            host=config.service.host,
            port=config.service.metrics_port,
            alive=lambda: not workers.have_served or workers.any_says_yes("/livez"),
            ready=lambda: not stop.is_set() and workers.any_says_yes("/readyz"),
        )
        stack.callback(admin.close)
        stack.callback(workers.stop)
        workers.start()
        while not stop.wait(_POLL_S):
            workers.tend(time.monotonic())
            if not workers.have_served and workers.all_serve:
                workers.have_served = True
                write_ready_file(
                    config.service.ready_file, port=http_port, grpc_port=grpc_port, metrics_port=admin.port
                )
        _log.info("draining", extra={"workers": len(workers.workers)})


def _hold(host: str, port: int) -> socket.socket:
    """Bound as long as the parent lives, and never listening: nobody else gets the port while a worker is replaced."""
    # First alone: the workers of another router must not share their port with these.
    bind(host, port, reuse_port=False).close()
    return bind(host, port, reuse_port=True)


def _stop_signal() -> threading.Event:
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def _says_yes(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
