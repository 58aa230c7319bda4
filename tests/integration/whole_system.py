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
from tests.integration.network import Proxy
from tests.integration.processes import LOOPBACK, START_TIMEOUT_S, Process, at_least, equal_to, wait_metric
from tests.integration.store_process import Store
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
PATIENT = (
    *("--vote-soft-deadline-ms", "30000", "--vote-hard-deadline-ms", "30000", "--drafter-warm-up-s", "60"),
    *("--heartbeat-interval-s", "2"),
)
"""A round waits for every drafter, on a busy machine as well: what these tests look for depends on no speed."""
EVERYBODY = (*PATIENT, "--asks", "all")
"""Beside a tiny target the draft model is hardly worth its time: who wants many tokens accepted asks it anyway."""
FIXED = ("--length", "fixed", *EVERYBODY)
"""And drafts are made in every round, whatever they cost."""

_HELD = {
    "router": ("moot_num_requests_running", "moot_num_requests_waiting", "moot_pool_depth", "moot_queued_tokens"),
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

    def add_router(self, flags: Sequence[str] = (), faults: str = "") -> Process:
        """One more router over the same peers and store; waits until it serves."""
        pairs = (f"{name}={self.address_of(process)}" for name, process in self.drafters.items())
        every = (
            *base_flags(self.model, ",".join(map(self.address_of, self.verifiers)), ",".join(pairs)),
            *(("--redis-url", self.store.url) if self.store else ()),
            *flags,
        )
        router = Process(self.supervisor, f"router-{len(self.routers)}", "router", every, faults)
        self.supervisor.wait_ready([router.child], START_TIMEOUT_S)
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
            if not self.store.is_running:
                self.store.restart()
        for process in self.processes:
            process.thaw()
        dead = [process for process in [*self.verifiers, *self.drafters.values()] if not process.is_running]
        for process in dead:
            process.begin_restart()
        for process in dead:
            process.wait_restarted()
        for router in self.routers:
            if router.is_running:
                self.wait_for_peers(router)
                if self.store is not None:
                    wait_metric(router, "moot_state_store_up", equal_to(1))

    def assert_idle(self) -> None:
        """Every living process has let go of everything: no request, no session, no KV, no draft in the pool."""
        for process in self.processes:
            if process.is_running and not process.is_frozen:
                for name in _HELD[process.role]:
                    wait_metric(process, name, equal_to(0))


def base_flags(model: Path, verifiers: str, drafters: str) -> tuple[str, ...]:
    """Of a router over these peers."""
    return (
        *("--model", str(model), "--served-model-name", "tiny", "--host", LOOPBACK, "--port", "0", "--grpc-port", "0"),
        *("--metrics-port", "0", "--verifiers", verifiers, *(("--drafters", drafters) if drafters else ())),
        *ROUTER_FLAGS,
    )


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
        supervisor = stack.enter_context(Supervisor(folder, grace_s=10))

        def peer(name: str, role: str, *flags: str) -> Process:
            every = ("--host", LOOPBACK, "--port", "0", "--metrics-port", "0", *flags)
            return Process(supervisor, name, role, every, faults.get(name, ""))

        own = ("--model", str(model), *VERIFIER_FLAGS, *verifier_flags)
        tokenizer = ("--tokenizer", str(model), *DRAFTER_FLAGS, *drafter_flags)
        system = System(
            supervisor,
            model,
            verifiers=[peer(f"verifier-{index}", "verifier", *own) for index in range(verifiers)],
            drafters={
                name: peer(f"drafter-{name}", "drafter", "--kind", kind, "--drafter-id", name, *tokenizer)
                for name, kind in kinds.items()
            },
            store=Store(supervisor, store_folder) if store else None,
        )
        stack.callback(_thaw_all, system)
        peers = {one.name: one for one in system.processes}
        children = [one.child for one in (*peers.values(), *((system.store,) if system.store else ()))]
        supervisor.wait_ready(children, START_TIMEOUT_S)
        for name in proxied:
            system.proxies[name] = Proxy(peers[name].address)
            stack.callback(system.proxies[name].close)
        system.add_router(router_flags, faults.get("router-0", ""))
        yield system


def _thaw_all(system: System) -> None:
    """A frozen process cannot be asked to end."""
    for process in system.processes:
        process.thaw()
    if system.store is not None:
        system.store.thaw()
