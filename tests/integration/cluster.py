"""A cluster on loopback: every pod is a process with an address of its own, and an API server says which there are.

    with running_cluster(folder, model, {"verifier": (), "suffix": ("--kind", "suffix", ...)}) as cluster:
        cluster.list_only("verifier", cluster.pods("verifier", 2))
        cluster.replace(old, new)  # as a rolling restart does

The router finds pods by the EndpointSlices alone. Linux takes all of 127.0.0.0/8 for loopback.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from moot.runtime.supervisor import Supervisor
from tests.integration.asking import Ask, Reply, assert_same
from tests.integration.processes import START_TIMEOUT_S, Process, equal_to, wait_metric
from tests.integration.slice_server import ApiServer, endpoint, kubeconfig, slice_of
from tests.integration.whole_system import DRAFTER_FLAGS, VERIFIER_FLAGS, base_flags
from tests.waiting import GIVE_UP_S, until

NAMESPACE = "serving"
VERIFIER = "verifier"
READY = {"ready": True, "serving": True, "terminating": False}
LEAVING = {"ready": False, "serving": True, "terminating": True}
"""A pod that was deleted and still works."""


@dataclass(slots=True)
class Cluster:
    """`drafters`: the flags of each pool by its drafter's id. Pods are started when they are first needed."""

    supervisor: Supervisor
    api: ApiServer
    model: Path
    drafters: Mapping[str, Sequence[str]]
    faults: Mapping[str, str]
    router: Process = field(init=False)
    ports: dict[str, int] = field(default_factory=dict)
    started: dict[str, list[Process]] = field(default_factory=dict)
    listed: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Endpoints by service and host, as the API server has them."""

    def pods(self, service: str, number: int) -> list[Process]:
        """So many running pods, those started first; the missing ones are started together."""
        return self.all_pods({service: number})[service]

    def all_pods(self, numbers: Mapping[str, int]) -> dict[str, list[Process]]:
        fresh: list[Process] = []
        for service, number in numbers.items():
            missing = number - len(self._running(service))
            fresh += [self._begin(service) for _ in range(missing)]
        self.supervisor.wait_ready([process.child for process in fresh], START_TIMEOUT_S)
        return {service: self._running(service)[:number] for service, number in numbers.items()}

    def _running(self, service: str) -> list[Process]:
        return [process for process in self.started[service] if process.is_running]

    def _begin(self, service: str) -> Process:
        number = len(self.started[service])
        host = f"127.1.{list(self.started).index(service)}.{number + 1}"
        where = ("--host", host, "--port", str(self.ports[service]), "--metrics-port", "0")
        if service == VERIFIER:
            role, own = "verifier", ("--model", str(self.model), *VERIFIER_FLAGS)
        else:
            role = "drafter"
            own = ("--drafter-id", service, "--tokenizer", str(self.model), *DRAFTER_FLAGS, *self.drafters[service])
        process = Process(self.supervisor, f"{service}-{number}", role, (*where, *own), self.faults.get(service, ""))
        self.started[service].append(process)
        return process

    def list_only(self, service: str, pods: Sequence[Process]) -> None:
        """These pods and no others are there; waits until the router uses them."""
        self.listed[service] = {pod.host: endpoint(pod.host, **READY) for pod in pods}
        self._tell(service)
        self.wait_peers(service, len(pods))

    def show(self, service: str, host: str, conditions: Mapping[str, bool]) -> None:
        self.listed[service][host] = endpoint(host, **conditions)
        self._tell(service)

    def hide(self, service: str, host: str, *, told: bool = True) -> None:
        """`told` False: the event is lost on its way to everybody who watches."""
        del self.listed[service][host]
        self._tell(service, told)

    def _tell(self, service: str, told: bool = True) -> None:
        self.api.put(slice_of(service, f"{service}-abcde", *self.listed[service].values()), told)

    def wait_peers(self, service: str, number: int, state: str = "ready") -> None:
        """Until the router has so many peers in this state, of all pools of this role together."""
        role = "verifier" if service == VERIFIER else "drafter"
        others = sum(len(self.listed[pool]) for pool in self.drafters if pool != service) if role == "drafter" else 0
        wanted = equal_to(number + (others if state == "ready" else 0))
        wait_metric(self.router, "moot_peers", wanted, role=role, state=state)

    def replace(self, service: str, old: Process, new: Process, *, told_first: bool = True) -> None:
        """As a Deployment does it: the new pod is ready; the old one leaves the endpoints, and is told to end, which
        race each other: `told_first` says whether routers hear of it before the pod does; then it is gone."""
        number = len(self.listed[service])
        self.show(service, new.host, READY)
        self.wait_peers(service, number + 1)
        if told_first:
            self.show(service, old.host, LEAVING)
            self.wait_peers(service, number)
        old.terminate()
        assert old.wait() == 0, old.log
        if not told_first:
            self.show(service, old.host, LEAVING)
        self.hide(service, old.host)
        self.wait_peers(service, number)


@contextmanager
def running_cluster(
    folder: Path, model: Path, drafters: Mapping[str, Sequence[str]], faults: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """An API server, and a router that asks it; one pod of each service. `faults`: MOOT_FAULTS of a service's pods."""
    with ExitStack() as stack:
        api = ApiServer()
        stack.callback(api.stop)
        supervisor = stack.enter_context(Supervisor(folder, grace_s=10))
        cluster = Cluster(supervisor, api, model, drafters, faults or {})
        for service in (VERIFIER, *drafters):
            cluster.ports[service], cluster.started[service], cluster.listed[service] = free_port(), [], {}
        first = cluster.all_pods(dict.fromkeys(cluster.ports, 1))
        config = folder / "kubeconfig"
        config.write_text(json.dumps(kubeconfig(api.port)))
        peers = {service: f"k8s:///{NAMESPACE}/{service}:{port}" for service, port in cluster.ports.items()}
        pools = ",".join(f"{pool}={peers[pool]}" for pool in drafters)
        environ = {"KUBECONFIG": str(config)}
        cluster.router = Process(
            supervisor, "router", "router", base_flags(model, peers[VERIFIER], pools), environ=environ
        )
        supervisor.wait_ready([cluster.router.child], START_TIMEOUT_S)
        for service, pods in first.items():
            cluster.list_only(service, pods)
        until(lambda: cluster.router.probe("/readyz") == 200, "the router is ready", START_TIMEOUT_S)
        yield cluster


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.1.255.1", 0))
        return int(probe.getsockname()[1])


class Load:
    """Steady load: `width` clients, each of which asks again as soon as it has its answer, whole or streamed in turn.

    Every answer must be the expected one; `stop` raises what the first wrong one was.
    """

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]], expected: Sequence[Reply], width: int) -> None:
        self._port = port
        self._cases = list(zip(bodies, expected, strict=True))
        self._numbers = count()
        self._stopped = threading.Event()
        self._errors: list[BaseException] = []
        self.num_answered = 0
        self._lock = threading.Lock()
        self._clients = [threading.Thread(target=self._run, daemon=True) for _ in range(width)]
        for client in self._clients:
            client.start()

    def wait_more(self, number: int) -> None:
        """Until so many further requests have been answered."""
        before = self.num_answered
        until(lambda: self.num_answered >= before + number or self._errors, f"{number} answers")
        self._check()

    def stop(self) -> None:
        self._stopped.set()
        for client in self._clients:
            client.join(GIVE_UP_S)
            assert not client.is_alive(), "a request has no end"
        self._check()

    def _check(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._errors:
                number = next(self._numbers)
                body, expected = self._cases[number % len(self._cases)]
                assert_same(Ask(self._port, body, stream=number % 2 == 0).result(), expected)
                with self._lock:
                    self.num_answered += 1
        except BaseException as error:  # noqa: BLE001 - raised again by whoever looks
            self._errors.append(error)


@contextmanager
def under_load(
    cluster: Cluster, bodies: Sequence[dict[str, Any]], expected: Sequence[Reply], width: int
) -> Iterator[Load]:
    load = Load(cluster.router.port, bodies, expected, width)
    try:
        yield load
    finally:
        load.stop()


def counted(pods: Sequence[Process], name: str) -> Callable[[], list[float]]:
    """How much the counter `name` of each pod has grown since now."""
    before = [pod.metric(name) for pod in pods]
    return lambda: [pod.metric(name) - start for pod, start in zip(pods, before, strict=True)]
