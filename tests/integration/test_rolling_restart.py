"""Pods come and go under load, as a cluster's API server tells of them: no request fails, and all pods get their share.

Every answer of the load is compared with plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Ask, Reply, assert_same, plain
from tests.integration.cluster import READY, VERIFIER, Cluster, counted, running_cluster, under_load
from tests.integration.faulty import STEP_DELAY, body
from tests.integration.processes import Process, at_least, equal_to, wait_metric
from tests.waiting import until

POOL = "suffix"
WIDTH = 8
BODIES = [body(index, max_tokens=30) for index in range(8)]
OPENED, ASKED = "moot_request_queue_time_seconds_count", "moot_draft_seconds_count"
"""Requests that a verifier took, and questions that a drafter answered."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("fleet")
    model = make_tiny_model(folder / "tiny")
    with running_cluster(folder / "logs", model, {POOL: ("--kind", "suffix")}, {VERIFIER: STEP_DELAY}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[Reply]:
    return [plain(cluster.router.port, asked) for asked in BODIES]


def assert_even(shares: Sequence[float]) -> None:
    mean = sum(shares) / len(shares)
    assert mean > 0
    assert all(abs(share - mean) <= 0.2 * mean for share in shares), shares


def num_peers(cluster: Cluster, role: str) -> float:
    """In whatever state."""
    return cluster.router.metric("moot_peers", role=role)


def list_pods(cluster: Cluster, number: int) -> tuple[list[Process], list[Process]]:
    """So many verifiers, and so many replicas of the pool, and nobody else."""
    pods = cluster.all_pods({VERIFIER: number, POOL: number})
    for service, listed in pods.items():
        cluster.list_only(service, listed)
    return pods[VERIFIER], pods[POOL]


def test_new_replicas_get_their_share(cluster: Cluster, expected: list[Reply]) -> None:
    """From one to four replicas of verifier and drafter pool under load: soon each gets a quarter of the requests,
    within 20 %, also where requests come one at a time."""
    list_pods(cluster, 1)
    cluster.all_pods({VERIFIER: 4, POOL: 4})
    with under_load(cluster, BODIES, expected, WIDTH) as load:
        load.wait_more(WIDTH)
        verifiers, drafters = list_pods(cluster, 4)
        # Those that run on the first ones, and with them the new ones' head start.
        load.wait_more(2 * WIDTH)
        opened, asked = counted(verifiers, OPENED), counted(drafters, ASKED)
        load.wait_more(15 * WIDTH)
        assert_even(opened())
        assert_even(asked())
    opened, asked = counted(verifiers, OPENED), counted(drafters, ASKED)
    for _ in range(12):
        assert_same(Ask(cluster.router.port, BODIES[0]).result(), expected[0])
    assert opened() == [3] * 4
    assert_even(asked())


def test_a_rolling_restart_fails_no_request(cluster: Cluster, expected: list[Reply]) -> None:
    """C26: two verifiers and two drafters replaced one by one under load: a new one is ready, the old one leaves the
    endpoints and is told to end, in either order. Each ends by itself, each new one works, every answer is right."""
    old_verifiers, old_drafters = list_pods(cluster, 2)
    pods = cluster.all_pods({VERIFIER: 4, POOL: 4})
    new_verifiers, new_drafters = pods[VERIFIER][2:], pods[POOL][2:]
    moved = cluster.router.metric("moot_request_moves_total", reason="draining")
    opened, asked = counted(new_verifiers, OPENED), counted(new_drafters, ASKED)
    with under_load(cluster, BODIES, expected, WIDTH) as load:
        for service, pairs in (
            (POOL, zip(old_drafters, new_drafters, strict=True)),
            (VERIFIER, zip(old_verifiers, new_verifiers, strict=True)),
        ):
            for (old, new), told_first in zip(pairs, (True, False), strict=True):
                load.wait_more(WIDTH)
                cluster.replace(service, old, new, told_first=told_first)
        load.wait_more(WIDTH)
    assert all(opened())
    assert all(asked())
    router = cluster.router
    assert router.metric("moot_request_moves_total", reason="draining") > moved
    assert router.metric("moot_request_moves_total", reason="lost") == 0
    assert router.metric("moot_requests_total", finish_reason="error") == 0
    assert router.metric("moot_requests_refused_total") == 0


def test_a_pod_that_is_not_ready_gets_nothing(cluster: Cluster, expected: list[Reply]) -> None:
    """C26: a pod that is listed and does not serve yet is not asked; once it serves it is."""
    list_pods(cluster, 1)
    late = cluster.pods(VERIFIER, 2)[1]
    opened = counted([late], OPENED)
    cluster.show(VERIFIER, late.host, {"ready": False, "serving": False, "terminating": False})
    with under_load(cluster, BODIES, expected, 2) as load:
        load.wait_more(6)
        assert opened() == [0]
        cluster.show(VERIFIER, late.host, READY)
        wait_metric(cluster.router, "moot_peers", equal_to(2), role="verifier", state="ready")
        load.wait_more(6)
        assert opened()[0] > 0


@pytest.mark.parametrize("service", [POOL, VERIFIER])
def test_a_dead_pod_that_stays_listed_costs_nothing(cluster: Cluster, expected: list[Reply], service: str) -> None:
    """C26: a pod dies and the event of its end is lost: requests go elsewhere and none fails, for as long as its
    address is listed; the list that follows the next broken watch takes it away."""
    list_pods(cluster, 2)
    dead = cluster.all_pods({VERIFIER: 2, POOL: 2})[service][1]
    role = "verifier" if service == VERIFIER else "drafter"
    with under_load(cluster, BODIES, expected, WIDTH) as load:
        load.wait_more(WIDTH)
        dead.kill()
        cluster.hide(service, dead.host, told=False)
        wait_metric(cluster.router, "moot_peers", equal_to(1), role=role, state="ready")
        load.wait_more(2 * WIDTH)
        assert num_peers(cluster, role) == 2, "its address is still there"
        cluster.api.cut_watches()
        until(lambda: num_peers(cluster, role) == 1, "the address is gone")
        load.wait_more(WIDTH)


def test_nothing_is_left_of_all_this(cluster: Cluster, expected: list[Reply]) -> None:
    """Routers and pods that still run hold no session, and no memory of a request, when the load has ended."""
    list_pods(cluster, 1)
    assert_same(Ask(cluster.router.port, BODIES[0]).result(), expected[0])
    wait_metric(cluster.router, "moot_num_requests_running", equal_to(0))
    for pods in cluster.started.values():
        for pod in pods:
            if pod.is_running:
                wait_metric(pod, "moot_num_sessions", equal_to(0))
    wait_metric(cluster.router, "moot_peers", at_least(1), role="verifier", state="ready")
