"""A whole system of real processes on loopback, for tests that kill, freeze and cut: see `running`.

    with running(folder, model, verifiers=2, drafters=("suffix", "ngram"), store=True) as system:
        expected = plain(system.router.port, body)  # of asking.py
        system.drafters["suffix"].freeze()
        assert_same(complete(system.router.port, body), expected)

Every bound is set short by flags, so that a test waits for what happens and never for a default.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moot.runtime.supervisor import Supervisor
from tests.integration.network import Proxies, Proxy
from tests.integration.processes import LOOPBACK, START_TIMEOUT_S, Process, at_least, equal_to, spawn, wait_metric
from tests.integration.store_process import Store, spawn_store
from tests.waiting import until

_LINK_FLAGS = ("--keepalive-time-ms", "1000", "--keepalive-timeout-ms", "5000")

VERIFIER_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--batch-invariant", "on", "--num-threads", "1"),
    *("--kv-capacity-tokens", "65536", "--heartbeat-interval-s", "0.5", "--drain-grace-s", "60"),
    *_LINK_FLAGS,
)
DRAFTER_FLAGS = ("--drain-grace-s", "60", *_LINK_FLAGS)
HEARTBEAT_S = 0.5
WATCHFUL = ("--heartbeat-interval-s", str(HEARTBEAT_S), "--max-missed-heartbeats", "3")
"""For the tests of verifiers that fall silent. Elsewhere none is given up that is only slow."""
ROUTER_FLAGS = (
    *("--heartbeat-interval-s", str(HEARTBEAT_S), "--max-missed-heartbeats", "60", "--no-verifier-wait-s", "3"),
    *("--open-timeout-s", "30", "--verify-timeout-s", "30", "--suspect-wait-s", "2"),
    *("--backoff-min-s", "0.05", "--backoff-max-s", "0.5", "--refused-retry-s", "1"),
    *("--describe-timeout-ms", "5000"),
    *("--vote-soft-deadline-ms", "100", "--vote-hard-deadline-ms", "300"),
    *("--eject-s", "1.5", "--drafter-warm-up-s", "0.3", "--drain-grace-s", "60"),
    *_LINK_FLAGS,
)

_HELD = {
    "router": ("moot_num_requests_running", "moot_num_requests_waiting", "moot_pool_depth"),
    "verifier": (
        *("moot_num_sessions", "moot_kv_cache_usage_ratio", "moot_num_requests_running", "moot_num_requests_waiting"),
        "moot_pool_depth",
    ),
    "drafter": ("moot_num_sessions",),
}


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
        child = spawn(self.supervisor, name, "router", every, environ_faults)
        self.supervisor.wait_ready([child], START_TIMEOUT_S)
        router = Process(self.supervisor, name, "router", tuple(every), environ_faults, child)
        self.routers.append(router)
        until(lambda: router.probe("/readyz") == 200, "the router is ready", START_TIMEOUT_S)
        self.wait_for_peers(router)
        return router

    def wait_for_peers(self, router: Process | None = None) -> None:
        """Until the router has a stream to every peer that runs."""
        router = router or self.router
        for role, peers in (("verifier", self.verifiers), ("drafter", list(self.drafters.values()))):
            count = sum(peer.is_running and not peer.is_frozen for peer in peers)
            wait_metric(router, "moot_peers", at_least(count), role=role, state="ready")

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
        for process in dead:
            process.wait_restarted()
        for router in self.routers:
            if router.is_running:
                self.wait_for_peers(router)

    def assert_idle(self) -> None:
        """Every living process has let go of everything: no request, no session, no KV, no draft in the pool."""
        for process in self.processes:
            if process.is_running and not process.is_frozen:
                for name in _HELD[process.role]:
                    wait_metric(process, name, equal_to(0))


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

    `model`: a folder, for instance of `moot.testing.tiny_model.make_tiny_model`. `drafters`: kinds, or drafter id to
    kind. `proxied`: names of peers (`verifier-0`, `drafter-suffix`) that the router reaches through a TCP proxy.
    `faults`: MOOT_FAULTS by name of the process. `..._flags` come last and so win over the short bounds of this module.
    `folder` gets the logs.
    """
    kinds = dict(drafters) if isinstance(drafters, Mapping) else {kind: kind for kind in drafters}
    faults = faults or {}
    with ExitStack() as stack:
        store_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moot-")))
        supervisor = stack.enter_context(Supervisor(folder, grace_s=grace_s))
        server = Store(supervisor, store_folder, spawn_store(supervisor, store_folder)) if store else None
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
            child = spawn(supervisor, name, role, flags, faults.get(name, ""))
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
