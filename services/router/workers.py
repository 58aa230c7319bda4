"""Several router processes behind one HTTP and one gRPC port: started, watched, replaced and ended as one.

Every worker is a whole router and listens on the same ports; the system hands each new connection to one of them
(SO_REUSEPORT). They share the record store and the peers as replicas of a deployment do, so that a request of a worker
that died is taken up from its record like any other, and limits are of one worker. The parent serves nothing but the
metrics port: every worker's metrics as one exposition, each sample with a label `worker`, and probes that ask the
workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from moot.client import Client, RequestFailed
from moot.rpc.grpc_server import write_ready_file
from moot.runtime.admin import AdminServer
from moot.runtime.supervisor import Supervisor
from services.router.api.http.http_server import bind
from services.router.config import RouterConfig

_log = logging.getLogger("moot.router.workers")

_TIMEOUT_S = 2.0


class WorkerMetrics(Collector):
    """The metrics of all workers. `addresses()`: base URL of the metrics of each worker that serves, by its name.

    A worker that does not answer in time is left out of this scrape.
    """

    def __init__(self, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._addresses = addresses

    def collect(self) -> list[Metric]:
        addresses = self._addresses()
        if not addresses:
            return []
        with ThreadPoolExecutor(len(addresses)) as threads:
            texts = threads.map(_scrape, addresses.values())
        return merged(dict(zip(addresses, texts, strict=True)))


def merged(texts: Mapping[str, str]) -> list[Metric]:
    """Families of all expositions, each sample with the label `worker`: the worker in whose text it stood."""
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in family.samples]
    return list(families.values())


def _scrape(address: str) -> str:
    try:
        return Client(address, timeout_s=_TIMEOUT_S).get("/metrics").decode()
    except RequestFailed as error:
        _log.warning("a worker's metrics are missing", extra={"cause": str(error)})
        return ""


_POLL_S = 0.1
_PROBE_TIMEOUT_S = 1.0
_LAST_WORDS_S = 10.0
"""Of a worker after its own drain."""


class Workers:
    """The workers of one parent, which `supervisor` runs and has no other children."""

    def __init__(self, config: RouterConfig, supervisor: Supervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        self.have_served = False
        """Whether all have been ready at a time. Before that an end ends all, after it the worker is replaced."""

    def start(self, argv: Sequence[str], http_port: int, grpc_port: int) -> None:
        """Start the workers. `argv`: the flags that the parent was started with, which its workers get too."""
        ports = ("--port", str(http_port), "--grpc-port", str(grpc_port), "--metrics-port", "0")
        flags = [*argv, "--workers", "1", "--reuse-port", "true", *ports]
        for index in range(self._config.workers):
            # All of the environment: what sets the parent sets its workers.
            self._supervisor.service(f"worker-{index}", "router", flags, environ=os.environ, logged=False)

    def check(self) -> bool:
        """Take note of workers that serve and that have ended; True when all serve for the first time.

        Raises ChildFailed when one ends before that.
        """
        self._supervisor.check()
        children = self._supervisor.children
        if self.have_served or not all(child.facts for child in children):
            return False
        for child in children:
            child.replaced = True
        self.have_served = True
        return True

    def addresses(self) -> dict[str, str]:
        """Addresses of the metrics ports of workers that serve, by the worker's number."""
        host = self._config.service.host
        host = host if host not in ("", "0.0.0.0") else "127.0.0.1"
        host = f"[{host if host != '::' else '::1'}]" if ":" in host else host
        facts = [child.facts for child in list(self._supervisor.children)]
        return {str(index): f"http://{host}:{one['metrics_port']}" for index, one in enumerate(facts) if one}

    def any_says_yes(self, path: str) -> bool:
        return any(_says_yes(address, path) for address in self.addresses().values())


def serve_workers(config: RouterConfig, argv: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError for ports that cannot be had, and ChildFailed."""
    stop = _stop_signal()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moot-router-")))
        held = [stack.enter_context(_hold(config.service.host, port)) for port in (config.port, config.grpc_port)]
        http_port, grpc_port = (int(one.getsockname()[1]) for one in held)
        supervisor = Supervisor(folder, grace_s=config.service.drain_grace_s + _LAST_WORDS_S, say=_log.error)
        workers = Workers(config, supervisor)
        admin = AdminServer(
            WorkerMetrics(workers.addresses),
            config.service,
            alive=lambda: not workers.have_served or workers.any_says_yes("/livez"),
            ready=lambda: not stop.is_set() and workers.any_says_yes("/readyz"),
        )
        stack.callback(admin.close)
        stack.enter_context(supervisor)
        workers.start(argv, http_port, grpc_port)
        while not stop.wait(_POLL_S):
            if workers.check():
                write_ready_file(
                    config.service.ready_file, port=http_port, grpc_port=grpc_port, metrics_port=admin.port
                )
        _log.info("draining", extra={"workers": config.workers})


def _hold(host: str, port: int) -> socket.socket:
    """A socket that is bound as long as the parent lives, and never listens: no other process gets the port while a
    worker is replaced."""
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


def _says_yes(address: str, path: str) -> bool:
    try:
        Client(address, timeout_s=_PROBE_TIMEOUT_S).get(path)
    except RequestFailed:
        return False
    return True
