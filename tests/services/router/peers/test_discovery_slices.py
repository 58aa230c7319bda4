"""Discovery in a cluster: the EndpointSlices of a Service, from an API server that does what API servers do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kubernetes import client
from kubernetes.config import kube_config

from moot.core.errors import ConfigError
from services.router.peers.discovery import (
    JoinedPeers,
    SlicePeers,
    StaticPeers,
    parse_slices,
    parse_source,
    serving_hosts,
)
from tests.integration.slice_server import ApiServer, endpoint, kubeconfig, slice_of
from tests.waiting import GIVE_UP_S

SERVICE = "moot-verifier"


class Heard:
    """The lists that a source has yielded."""

    def __init__(self) -> None:
        self.lists: list[set[str]] = []
        self.changed = asyncio.Event()

    async def until(self, *addresses: str) -> None:
        """Wait for a list of these hosts as the last one."""
        wanted = {f"{address}:7100" for address in addresses}
        async with asyncio.timeout(GIVE_UP_S):
            while not self.lists or self.lists[-1] != wanted:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def following(server: ApiServer, watch_s: int = 60, backoff_max_s: float = 0.2) -> AsyncIterator[Heard]:
    configuration = client.Configuration(host=f"http://127.0.0.1:{server.port}")
    configuration.retries = False
    api = client.DiscoveryV1Api(client.ApiClient(configuration))
    source = SlicePeers(api, "serving", SERVICE, 7100, timeout_s=30.0, watch_s=watch_s, backoff_max_s=backoff_max_s)
    heard = Heard()
    watching = source.watch()

    async def follow() -> None:
        async for addresses in watching:
            heard.lists.append(set(addresses))
            heard.changed.set()

    task = asyncio.create_task(follow())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watching.aclose()
        await no_threads()


async def no_threads() -> None:
    """Whoever stops following leaves no thread behind."""
    async with asyncio.timeout(GIVE_UP_S):
        while any(thread.name == f"endpoints {SERVICE}" for thread in threading.enumerate()):  # noqa: ASYNC110 - threads set no event
            await asyncio.sleep(0.01)


@pytest.fixture
def server() -> Any:
    made = ApiServer()
    yield made
    made.stop()


def run(server: ApiServer, scenario: Callable[[ApiServer, Heard], Any], **options: Any) -> None:
    async def main() -> None:
        async with following(server, **options) as heard:
            await scenario(server, heard)

    asyncio.run(main())


def test_pods_come_and_go(server: ApiServer) -> None:
    """The first list, a pod more, a pod less, a slice less: every change is heard from the watch."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        await heard.until("10.0.0.1", "10.0.0.2")
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2")))
        await heard.until("10.0.0.2")
        server.delete("a")
        await heard.until()
        assert server.lists == 1

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


def test_several_slices_are_one_service(server: ApiServer) -> None:
    """The pods of all slices together; one named by two slices stays until both have let go of it."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
        server.put(slice_of(SERVICE, "c", endpoint("10.0.0.4")))
        await heard.until("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
        server.delete("b")
        await heard.until("10.0.0.1", "10.0.0.4")

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
    server.put(slice_of(SERVICE, "b", endpoint("10.0.0.2"), endpoint("10.0.0.3")))
    run(server, scenario)


def test_only_pods_that_serve_and_stay_are_peers() -> None:
    """Ready or serving, and not terminating; conditions that are absent mean the best."""
    item = slice_of(
        SERVICE,
        "a",
        endpoint("10.0.0.1", ready=True, serving=True, terminating=False),
        endpoint("10.0.0.2", ready=False, serving=True, terminating=True),
        endpoint("10.0.0.3", ready=False, serving=False, terminating=False),
        endpoint("10.0.0.4", ready=False),
        endpoint("10.0.0.5", ready=True),
        {"addresses": ["10.0.0.6"]},
        {"addresses": ["10.0.0.7"], "conditions": {"ready": None, "serving": None}},
    )
    assert serving_hosts(item) == {"10.0.0.1", "10.0.0.5", "10.0.0.6", "10.0.0.7"}
    assert serving_hosts({**item, "addressType": "FQDN"}) == frozenset()
    assert serving_hosts({"metadata": {"name": "a"}, "endpoints": None}) == frozenset()


def test_addresses_of_the_sixth_version_are_bracketed(server: ApiServer) -> None:
    """host:port of an IPv6 pod is one that a channel can be opened to."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("[fd00::1]")

    server.put({**slice_of(SERVICE, "a", endpoint("fd00::1")), "addressType": "IPv6"})
    run(server, scenario)


def test_missed_events_are_made_up_for(server: ApiServer) -> None:
    """A change that no watch was told of is heard at the next list, which every end of a watch brings."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        await server.until(lambda server: server.watches == 1)
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2")), told=False)
        server.cut_watches()
        await heard.until("10.0.0.2")
        assert heard.lists == [{"10.0.0.1:7100"}, {"10.0.0.2:7100"}]

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


def test_a_watch_that_ends_in_time_is_followed_by_a_list(server: ApiServer) -> None:
    """No watch lasts for ever: a change that was never told is heard within one, without any fault."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2")), told=False)
        await heard.until("10.0.0.2")

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario, watch_s=1)


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_version_that_is_gone_is_listed_anew(server: ApiServer, how: str) -> None:
    """410, as an event of the watch or as the answer to it: the list is asked for, and nothing is dropped meanwhile."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        await server.until(lambda server: server.watches == 1)
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2")), told=False)
        if how == "event":
            server.say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})
        else:
            server.refuse_watches = 2
            server.cut_watches()
        await heard.until("10.0.0.2")
        assert set() not in heard.lists
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.3")))
        await heard.until("10.0.0.3")

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


def test_bookmarks_change_nothing(server: ApiServer) -> None:
    """A bookmark carries a version and no endpoints: the list stays, and so does the watch."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        server.say({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "999"}}})
        server.put(slice_of(SERVICE, "b", endpoint("10.0.0.2")))
        await heard.until("10.0.0.1", "10.0.0.2")
        assert len(heard.lists) == 2
        assert server.lists == 1

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


@pytest.mark.parametrize(
    "answer",
    [500, 403, 429, b"", b"not json", b"[]", {"items": []}, {"metadata": {"resourceVersion": "1"}, "items": [{}]}],
    ids=str,
)
def test_a_wrong_answer_empties_nothing(server: ApiServer, answer: Any) -> None:
    """Errors and nonsense in place of a list leave the last one in place, until a good one comes."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        await server.until(lambda server: server.watches == 1)
        server.answers = [answer, answer]
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2")), told=False)
        server.cut_watches()
        await heard.until("10.0.0.2")
        assert server.answers == []
        assert heard.lists == [{"10.0.0.1:7100"}, {"10.0.0.2:7100"}]

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


@pytest.mark.parametrize("event", [{}, {"type": "MODIFIED", "object": {}}, {"type": "ADDED"}, [], None], ids=str)
def test_nonsense_in_a_watch_empties_nothing(server: ApiServer, event: Any) -> None:
    """An event that is none ends the watch, not the following."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        await server.until(lambda server: server.watches == 1)
        server.say(event)
        await server.until(lambda server: server.watches >= 2)
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2")))
        await heard.until("10.0.0.2")
        assert set() not in heard.lists

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


@pytest.mark.parametrize("outage_s", [1.5, pytest.param(60.0, marks=pytest.mark.long)])
def test_an_outage_keeps_the_last_list(server: ApiServer, outage_s: float) -> None:
    """Nobody answers for a while: the pods that were known stay known; what changed meanwhile is heard afterwards."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1", "10.0.0.2")
        await server.until(lambda server: server.watches == 1)
        await asyncio.to_thread(server.stop)
        # The outage itself: its length is what is tested.
        await asyncio.sleep(outage_s)
        assert heard.lists == [{"10.0.0.1:7100", "10.0.0.2:7100"}]
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.2"), endpoint("10.0.0.3")), told=False)
        server.start()
        await heard.until("10.0.0.2", "10.0.0.3")

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
    run(server, scenario)


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    """A router that starts before the API server answers gets its first list when there is one."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await asyncio.sleep(0.3)
        assert heard.lists == []
        server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
        server.start()
        await heard.until("10.0.0.1")

    server = ApiServer()
    server.stop()
    try:
        run(server, scenario)
    finally:
        server.stop()


def test_a_silent_watch_is_let_go(server: ApiServer) -> None:
    """Following can be ended at any time, also while the watch says nothing, and leaves no thread behind."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        await server.until(lambda server: server.watches == 1)

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    run(server, scenario)


def test_a_watch_that_is_answered_too_late_is_let_go(server: ApiServer) -> None:
    """Following ends while the server thinks about a watch: its answer, which never ends by itself, holds no thread."""

    async def scenario(server: ApiServer, heard: Heard) -> None:
        await heard.until("10.0.0.1")
        await server.until(lambda server: server.watches == 1)
        threading.Timer(0.3, server.answers_watches.set).start()

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    server.answers_watches.clear()
    run(server, scenario, watch_s=3600)


def test_the_address_of_a_service_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """`k8s:///namespace/service:port`; what is none is quoted, and without a cluster the error says so."""
    peers = parse_slices("k8s:///serving/moot-verifier:7100", 3.0, api=object())
    assert (peers.namespace, peers.service, peers.port) == ("serving", "moot-verifier", 7100)
    for wrong in ("k8s:///moot-verifier:7100", "k8s:///a/b", "k8s:///a/b:http", "k8s:///a/B:1", "k8s:///a/b/c:1"):
        with pytest.raises(ConfigError, match="NAMESPACE/SERVICE:PORT"):
            parse_source([wrong], 1, 1)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no kubeconfig"):
        parse_source(["k8s:///serving/moot-verifier:7100"], 1, 1)


def test_outside_a_cluster_the_kubeconfig_says_where_it_is(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A router on somebody's own machine finds the pods of the cluster that kubectl would ask."""
    path = tmp_path / "config"
    path.write_text(json.dumps(kubeconfig(server.port)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))

    async def main() -> None:
        watching = parse_source([f"k8s:///serving/{SERVICE}:7100"], 1, 5).watch()
        async with asyncio.timeout(GIVE_UP_S):
            assert await anext(watching) == {"10.0.0.1:7100"}
        await watching.aclose()
        await no_threads()

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    asyncio.run(main())


def test_it_joins_other_sources(server: ApiServer) -> None:
    """A static address beside a watched Service: the union of both."""

    async def main() -> None:
        configuration = client.Configuration(host=f"http://127.0.0.1:{server.port}")
        configuration.retries = False
        peers = SlicePeers(client.DiscoveryV1Api(client.ApiClient(configuration)), "serving", SERVICE, 7100, 2.0)
        joined = JoinedPeers((StaticPeers(frozenset({"10.9.9.9:7100"})), peers)).watch()
        async with asyncio.timeout(GIVE_UP_S):
            async for addresses in joined:
                if addresses == {"10.9.9.9:7100", "10.0.0.1:7100"}:
                    break
        await joined.aclose()
        await no_threads()

    server.put(slice_of(SERVICE, "a", endpoint("10.0.0.1")))
    asyncio.run(main())
