"""One service process of a test: signals, restarts, metrics, and waiting for what they say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from moot.runtime.supervisor import Child, ChildFailed, Supervisor
from tests.waiting import GIVE_UP_S, until

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0

_PORT_FACTS = (("--port", "port"), ("--metrics-port", "metrics_port"), ("--grpc-port", "grpc_port"))


@dataclass(slots=True)
class Signalled:
    """A child process that takes signals of its own."""

    supervisor: Supervisor
    child: Child = field(init=False)
    is_frozen: bool = field(default=False, init=False)

    @property
    def is_running(self) -> bool:
        return self.child.status is None

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.wait()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float = GIVE_UP_S) -> int:
        """Exit status; raises subprocess.TimeoutExpired."""
        return self.child.process.wait(timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self.child.process.send_signal(number)


@dataclass(slots=True)
class Process(Signalled):
    """One service process; made, it is being started. A restart takes the same ports. `faults`: its MOOT_FAULTS."""

    name: str
    role: str
    flags: tuple[str, ...]
    faults: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        environ = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ |= {"MOOT_FAULTS": self.faults, **self.environ}
        self.child = self.supervisor.service(self.name, self.role, self.flags, environ=environ, essential=False)
        self.is_frozen = False

    @property
    def port(self) -> int:
        return self.child.port

    @property
    def metrics_port(self) -> int:
        return int(self.child.facts["metrics_port"])

    @property
    def grpc_port(self) -> int:
        return int(self.child.facts["grpc_port"])

    @property
    def host(self) -> str:
        return self.flags[self.flags.index("--host") + 1]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return self.child.log.read_text(errors="replace")

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.child.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def restart(self) -> None:
        """Start it again where it listened before, and wait until it is ready."""
        self.begin_restart()
        self.wait_restarted()

    def begin_restart(self) -> None:
        """As `restart`, without the wait: `wait_restarted`."""
        assert not self.is_running, f"{self.name} still runs"
        for flag, fact in _PORT_FACTS:
            if fact in self.child.facts:
                place = self.flags.index(flag) + 1
                self.flags = (*self.flags[:place], str(self.child.facts[fact]), *self.flags[place + 1 :])
        self._start()

    def wait_restarted(self) -> None:
        """Until it is ready. Its port is anybody's while it is away: where a connection has it just now, again."""

        def is_ready() -> bool:
            try:
                self.supervisor.wait_ready([self.child], START_TIMEOUT_S)
            except ChildFailed as error:
                if not any(said in str(error) for said in ("cannot listen on", "cannot serve metrics")):
                    raise
                self.begin_restart()
                return False
            return True

        until(is_ready, f"{self.name} has its port again", poll_s=1)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` (full name, with `_total`) that have these labels."""
        text = get(self.metrics_port, "/metrics", self.host).raise_for_status().text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def probe(self, path: str) -> int:
        """Status of GET `path` on the metrics port."""
        return get(self.metrics_port, path, self.host).status_code


# One for all: each new one reads the system's certificates.
_HTTP = httpx.Client(timeout=GIVE_UP_S, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)


def get(port: int, path: str, host: str = LOOPBACK) -> httpx.Response:
    """Whatever its status, on a connection of its own. Raises httpx.TransportError."""
    return _HTTP.get(f"http://{host}:{port}{path}")


def wait_metric(process: Process, name: str, is_good: Callable[[float], bool], **labels: str) -> float:
    """The value of the metric once it is good; an AssertionError that tells the last one seen."""
    deadline = time.monotonic() + GIVE_UP_S
    while not is_good(value := process.metric(name, **labels)):
        assert time.monotonic() < deadline, f"{name}{labels or ''} of {process.name} is {value} after {GIVE_UP_S:g} s"
        time.sleep(0.03)
    return value


def at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def equal_to(wanted: float) -> Callable[[float], bool]:
    return lambda value: value == wanted
