"""A whole system of real processes on loopback, for tests that kill, freeze and cut: see `running`.

    with running(folder, model, verifiers=2, drafters=("suffix", "ngram"), store=True) as system:
        expected = plain(system.router.port, body)  # of asking.py
        system.drafters["suffix"].freeze()
        assert_same(complete(system.router.port, body), expected)

Every bound is set short by flags, so that a test waits for what happens and never for a default.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from moot import embedded_store
from moot.supervisor import Child, Supervisor
from moot.testing import TcpProxy

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0
SETTLE_S = 10.0
"""For a condition that takes a moment on an idle machine and must not fail on a busy one."""

_LINK_FLAGS = ("--keepalive-time-ms", "1000", "--keepalive-timeout-ms", "1000")

VERIFIER_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--deterministic", "on", "--num-threads", "1"),
    *("--kv-capacity-tokens", "65536", "--heartbeat-interval-s", "0.5", "--drain-grace-s", "10"),
    *_LINK_FLAGS,
)
DRAFTER_FLAGS = ("--drain-grace-s", "10", *_LINK_FLAGS)
ROUTER_FLAGS = (
    *("--heartbeat-interval-s", "0.5", "--max-missed-heartbeats", "3", "--no-verifier-wait-s", "3"),
    *("--open-timeout-s", "30", "--verify-timeout-s", "30", "--probation-wait-s", "2"),
    *("--backoff-min-s", "0.05", "--backoff-max-s", "0.5", "--refused-retry-s", "1"),
    *("--describe-timeout-ms", "1000"),
    *("--vote-soft-deadline-ms", "50", "--vote-hard-deadline-ms", "150"),
    *("--eject-s", "1.5", "--drafter-warm-up-s", "0.3", "--drain-grace-s", "20"),
    *_LINK_FLAGS,
)

ResultT = TypeVar("ResultT")


def eventually(condition: Callable[[], Any], what: str, within_s: float = SETTLE_S) -> Any:
    """The first true value of `condition`; an AssertionError saying `what` after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)
    return value


@dataclass(slots=True)
class Process:
    """One service process. Signals go to it alone; a restart takes the same ports."""

    supervisor: Supervisor
    name: str
    role: str
    flags: tuple[str, ...]
    faults: str
    child: Child
    is_frozen: bool = False

    @property
    def port(self) -> int:
        return self.child.port

    @property
    def metrics_port(self) -> int:
        return int(self.child.facts["metrics_port"])

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.child.status is None

    @property
    def log(self) -> str:
        return self.child.log.read_text(errors="replace")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.child.process.wait(SETTLE_S)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Exit status; raises subprocess.TimeoutExpired."""
        return self.child.process.wait(timeout_s)

    def restart(self, faults: str | None = None) -> None:
        """Start it again where it listened before, with other fault points if given, and wait until it is ready."""
        self.begin_restart(faults)
        self.supervisor.wait_ready([self.child], START_TIMEOUT_S)

    def begin_restart(self, faults: str | None = None) -> None:
        """As `restart`, without the wait."""
        assert not self.is_running, f"{self.name} still runs"
        ports = {flag: str(self.child.facts[fact]) for flag, fact in _PORT_FACTS if fact in self.child.facts}
        for flag, port in ports.items():
            self.flags = _with_flag(self.flags, flag, port)
        self.faults = self.faults if faults is None else faults
        self.child = _spawn(self.supervisor, self.name, self.role, self.flags, self.faults)
        self.is_frozen = False

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` (full name, with `_total`) that have these labels."""
        url = f"http://{LOOPBACK}:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=SETTLE_S) as response:
            text = response.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def probe(self, path: str) -> int:
        """Status of GET `path` on the metrics port."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}{path}", timeout=SETTLE_S) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self.child.process.send_signal(number)


def wait_metric(
    process: Process, name: str, is_good: Callable[[float], bool], *, within_s: float = SETTLE_S, **labels: str
) -> float:
    """The value of the metric once it is good; an AssertionError that tells the last one seen."""
    deadline = time.monotonic() + within_s
    while not is_good(value := process.metric(name, **labels)):
        assert time.monotonic() < deadline, f"{name}{labels or ''} of {process.name} is {value} after {within_s:g} s"
        time.sleep(0.03)
    return value


def at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def equal_to(wanted: float) -> Callable[[float], bool]:
    return lambda value: value == wanted


@dataclass(slots=True)
class Store:
    """The record server, on a Unix socket. Its data survive a restart."""

    supervisor: Supervisor
    folder: Path
    child: Child
    is_frozen: bool = False

    @property
    def url(self) -> str:
        return embedded_store.store_url(self.folder)

    def kill(self) -> None:
        self.child.process.send_signal(signal.SIGKILL)
        self.child.process.wait(SETTLE_S)

    def freeze(self) -> None:
        self.child.process.send_signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        if self.child.status is None:
            self.child.process.send_signal(signal.SIGCONT)
        self.is_frozen = False

    def restart(self) -> None:
        self.child = _spawn_store(self.supervisor, self.folder)
        self.supervisor.wait_ready([self.child], START_TIMEOUT_S)

    def client(self) -> Any:
        """A plain client of redis-py, for looking and for breaking."""
        import redis

        return redis.Redis.from_url(self.url, socket_timeout=SETTLE_S)


class Proxies:
    """TCP proxies on a thread with a loop of its own, so that synchronous tests can use them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._proxies: list[TcpProxy] = []

    def to(self, address: str) -> Proxy:
        proxy = TcpProxy.to(address)
        self._proxies.append(proxy)
        self.run(proxy.start())
        return Proxy(self, proxy)

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SETTLE_S)

    def close(self) -> None:
        for proxy in self._proxies:
            self.run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SETTLE_S)
        self._loop.close()


@dataclass(frozen=True, slots=True)
class Proxy:
    """The network between the router and one peer."""

    owner: Proxies
    proxy: TcpProxy

    @property
    def address(self) -> str:
        return self.proxy.address

    def partition(self, *directions: str) -> None:
        """Stop `up` (to the peer), `down` (to the router), or both when none is named."""
        self._do(lambda: self.proxy.partition(*directions))

    def heal(self) -> None:
        self._do(self.proxy.heal)

    def cut(self) -> None:
        self._do(self.proxy.cut)

    def reset(self) -> None:
        self._do(self.proxy.reset)

    def _do(self, action: Callable[[], None]) -> None:
        async def work() -> None:
            action()

        self.owner.run(work())


@dataclass(slots=True)
class System:
    """Everything that runs. `routers[0]` is `router`; `proxies` by the name of the process behind them."""

    supervisor: Supervisor
    model: Path
    verifiers: list[Process]
    drafters: dict[str, Process]
    store: Store | None
    routers: list[Process] = field(default_factory=list)
    proxies: dict[str, Proxy] = field(default_factory=dict)

    @property
    def router(self) -> Process:
        return self.routers[0]

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.router.port}"

    @property
    def processes(self) -> list[Process]:
        return [*self.routers, *self.verifiers, *self.drafters.values()]

    def address_of(self, process: Process) -> str:
        """Where the router reaches it: its proxy if it has one."""
        return self.proxies[process.name].address if process.name in self.proxies else process.address

    def add_router(self, flags: Sequence[str] = (), environ_faults: str = "") -> Process:
        """One more router over the same peers and store; waits until it serves."""
        name = f"router-{len(self.routers)}"
        every = [
            *("--model", str(self.model), "--served-model-name", "tiny", "--host", LOOPBACK, "--port", "0"),
            *("--grpc-port", "0", "--metrics-port", "0"),
            *("--verifiers", ",".join(map(self.address_of, self.verifiers))),
            *(("--redis-url", self.store.url) if self.store else ()),
            *ROUTER_FLAGS,
            *flags,
        ]
        if self.drafters:
            pairs = (f"{name}={self.address_of(process)}" for name, process in self.drafters.items())
            every += ["--drafters", ",".join(pairs)]
        child = _spawn(self.supervisor, name, "router", every, environ_faults)
        self.supervisor.wait_ready([child], START_TIMEOUT_S)
        router = Process(self.supervisor, name, "router", tuple(every), environ_faults, child)
        self.routers.append(router)
        eventually(lambda: router.probe("/readyz") == 200, "the router is ready", START_TIMEOUT_S)
        self.wait_for_peers(router)
        return router

    def wait_for_peers(self, router: Process | None = None) -> None:
        """Until the router has a stream to every peer that runs."""
        router = router or self.router
        for role, peers in (("verifier", self.verifiers), ("drafter", list(self.drafters.values()))):
            count = sum(peer.is_running and not peer.is_frozen for peer in peers)
            wait_metric(router, "moot_peers", at_least(count), within_s=30, role=role, state="ready")

    def heal(self) -> None:
        """Whatever a test has broken, other than what it killed for good: whole again, and all peers connected."""
        for proxy in self.proxies.values():
            proxy.heal()
        if self.store is not None:
            self.store.thaw()
            if self.store.child.status is not None:
                self.store.restart()
        for process in self.processes:
            if process.is_running:
                process.thaw()
        dead = [process for process in [*self.verifiers, *self.drafters.values()] if not process.is_running]
        for process in dead:
            process.begin_restart()
        self.supervisor.wait_ready([process.child for process in dead], START_TIMEOUT_S)
        for router in self.routers:
            if router.is_running:
                self.wait_for_peers(router)

    def assert_idle(self, within_s: float = SETTLE_S) -> None:
        """Every living process has let go of everything: no request, no session, no KV, no draft in the pool."""
        for process in self.processes:
            if process.is_running and not process.is_frozen:
                for name in _HELD[process.role]:
                    wait_metric(process, name, equal_to(0), within_s=within_s)


_HELD = {
    "router": ("moot_num_requests_running", "moot_num_requests_waiting", "moot_pool_depth"),
    "verifier": (
        *("moot_num_sessions", "moot_kv_cache_usage_ratio", "moot_num_requests_running", "moot_num_requests_waiting"),
        "moot_pool_depth",
    ),
    "drafter": ("moot_num_sessions",),
}
_PORT_FACTS = (("--port", "port"), ("--metrics-port", "metrics_port"), ("--grpc-port", "grpc_port"))


@contextmanager
def running(
    folder: Path,
    model: Path,
    *,
    verifiers: int = 1,
    drafters: Iterable[str] | Mapping[str, str] = (),
    store: bool = False,
    proxied: Iterable[str] = (),
    faults: Mapping[str, str] | None = None,
    verifier_flags: Sequence[str] = (),
    drafter_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
    grace_s: float = 10.0,
) -> Iterator[System]:
    """Start it, wait until the router has met everybody, end it on leaving.

    `model`: a folder, for instance of `moot.model.tiny.make_tiny_model`. `drafters`: kinds, or drafter id to kind.
    `proxied`: names of peers (`verifier-0`, `drafter-suffix`) that the router reaches through a TCP proxy. `faults`:
    MOOT_FAULTS by name of the process. `..._flags` come last and so win over the short bounds of this module.
    `folder` gets the logs.
    """
    kinds = dict(drafters) if isinstance(drafters, Mapping) else {kind: kind for kind in drafters}
    faults = faults or {}
    with ExitStack() as stack:
        store_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moot-")))
        supervisor = stack.enter_context(Supervisor(folder, grace_s=grace_s))
        server = Store(supervisor, store_folder, _spawn_store(supervisor, store_folder)) if store else None
        plans = [
            (f"verifier-{index}", "verifier", ("--model", str(model), *VERIFIER_FLAGS, *verifier_flags))
            for index in range(verifiers)
        ]
        plans += [
            (
                f"drafter-{name}",
                "drafter",
                ("--kind", kind, "--drafter-id", name, "--tokenizer", str(model), *DRAFTER_FLAGS, *drafter_flags),
            )
            for name, kind in kinds.items()
        ]
        peers = []
        for name, role, flags in plans:
            flags = ("--host", LOOPBACK, "--port", "0", "--metrics-port", "0", *flags)
            child = _spawn(supervisor, name, role, flags, faults.get(name, ""))
            peers.append(Process(supervisor, name, role, flags, faults.get(name, ""), child))
        supervisor.wait_ready(
            [peer.child for peer in peers] + ([server.child] if server is not None else []), START_TIMEOUT_S
        )
        system = System(
            supervisor,
            model,
            verifiers=[peer for peer in peers if peer.role == "verifier"],
            drafters={name: peer for name, peer in zip(kinds, peers[verifiers:], strict=True)},
            store=server,
        )
        if proxied := tuple(proxied):
            proxies = Proxies()
            stack.callback(proxies.close)
            by_name = {peer.name: peer for peer in peers}
            system.proxies.update({name: proxies.to(by_name[name].address) for name in proxied})
        stack.callback(_thaw_all, system)
        system.add_router(router_flags, faults.get("router-0", ""))
        yield system


def _thaw_all(system: System) -> None:
    """A frozen process cannot be asked to end."""
    for process in system.processes:
        process.thaw()
    if system.store is not None:
        system.store.thaw()


def _spawn(supervisor: Supervisor, name: str, role: str, flags: Sequence[str], faults: str) -> Child:
    environ = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return supervisor.service(name, role, list(flags), environ=environ | {"MOOT_FAULTS": faults}, essential=False)


def _spawn_store(supervisor: Supervisor, folder: Path) -> Child:
    (folder / embedded_store.SOCKET_NAME).unlink(missing_ok=True)
    return supervisor.spawn(
        "store", embedded_store.store_argv(folder), essential=False, look=lambda: embedded_store.is_ready(folder)
    )


def _with_flag(flags: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """`flags` with the value of `flag` replaced."""
    found = list(flags)
    found[found.index(flag) + 1] = value
    return tuple(found)
