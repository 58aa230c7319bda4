"""Discovery in a cluster: the EndpointSlices of a Service, from an API server that does what API servers do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
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
from tests.waiting import GIVE_UP_S, eventually

SERVICE = "moot-verifier"


def slices(name: str, *hosts: str) -> dict[str, Any]:
    return slice_of(SERVICE, name, *map(endpoint, hosts))


class Followed:
    """An API server, and the lists that a source which follows it has yielded."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.lists: list[set[str]] = []
        self.changed = asyncio.Event()

    async def hear(self, *hosts: str) -> None:
        """Wait for a list of these hosts as the last one."""
        async with asyncio.timeout(GIVE_UP_S):
            while not self.lists or self.lists[-1] != addresses(*hosts):
                self.changed.clear()
                await self.changed.wait()

    async def settled(self) -> None:
        """The first list is heard, and a watch is open."""
        await self.hear("10.0.0.1")
        await self.server.until(lambda server: server.watches == 1)

    def put(self, name: str, *hosts: str, told: bool = True) -> None:
        self.server.put(slices(name, *hosts), told=told)


def addresses(*hosts: str) -> set[str]:
    return {f"{host}:7100" for host in hosts}


def source_of(server: ApiServer, **options: Any) -> SlicePeers:
    configuration = client.Configuration(host=f"http://127.0.0.1:{server.port}")
    configuration.retries = False
    api = client.DiscoveryV1Api(client.ApiClient(configuration))
    return SlicePeers(api, "serving", SERVICE, 7100, timeout_s=30.0, **options)


@asynccontextmanager
async def following(server: ApiServer, *, watch_s: int = 60) -> AsyncIterator[Followed]:
    heard = Followed(server)
    watching = source_of(server, watch_s=watch_s, backoff_max_s=0.2).watch()

    async def follow() -> None:
        async for found in watching:
            heard.lists.append(set(found))
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
    await eventually(lambda: all(thread.name != f"endpoints {SERVICE}" for thread in threading.enumerate()))


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """With one slice of one pod."""
    made = ApiServer()
    made.put(slices("a", "10.0.0.1"))
    yield made
    made.stop()


@pytest.fixture
def followed(server: ApiServer) -> Any:
    return following(server)


async def test_pods_come_and_go(followed: Followed) -> None:
    """The first list, a pod more, a pod less, a slice less: every change is heard from the watch."""
    await followed.hear("10.0.0.1")
    followed.put("a", "10.0.0.1", "10.0.0.2")
    await followed.hear("10.0.0.1", "10.0.0.2")
    followed.put("a", "10.0.0.2")
    await followed.hear("10.0.0.2")
    followed.server.delete("a")
    await followed.hear()
    assert followed.server.lists == 1


async def test_several_slices_are_one_service(followed: Followed) -> None:
    """The pods of all slices together; one named by two slices stays until both have let go of it."""
    followed.put("a", "10.0.0.1", "10.0.0.2")
    followed.put("b", "10.0.0.2", "10.0.0.3")
    await followed.hear("10.0.0.1", "10.0.0.2", "10.0.0.3")
    followed.put("a", "10.0.0.1")
    followed.put("c", "10.0.0.4")
    await followed.hear("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    followed.server.delete("b")
    await followed.hear("10.0.0.1", "10.0.0.4")


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


async def test_addresses_of_the_sixth_version_are_bracketed(followed: Followed) -> None:
    """host:port of an IPv6 pod is one that a channel can be opened to."""
    followed.server.put({**slices("a", "fd00::1"), "addressType": "IPv6"})
    await followed.hear("[fd00::1]")


async def test_missed_events_are_made_up_for(followed: Followed) -> None:
    """A change that no watch was told of is heard at the next list, which every end of a watch brings."""
    await followed.settled()
    followed.put("a", "10.0.0.2", told=False)
    followed.server.cut_watches()
    await followed.hear("10.0.0.2")
    assert followed.lists == [addresses("10.0.0.1"), addresses("10.0.0.2")]


async def test_a_watch_that_ends_in_time_is_followed_by_a_list(server: ApiServer) -> None:
    """No watch lasts for ever: a change that was never told is heard within one, without any fault."""
    async with following(server, watch_s=1) as followed:
        await followed.hear("10.0.0.1")
        followed.put("a", "10.0.0.2", told=False)
        await followed.hear("10.0.0.2")


@pytest.mark.parametrize("how", ["event", "status"])
async def test_a_version_that_is_gone_is_listed_anew(followed: Followed, how: str) -> None:
    """410, as an event of the watch or as the answer to it: the list is asked for, and nothing is dropped meanwhile."""
    await followed.settled()
    followed.put("a", "10.0.0.2", told=False)
    if how == "event":
        followed.server.say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})
    else:
        followed.server.refuse_watches = 2
        followed.server.cut_watches()
    await followed.hear("10.0.0.2")
    assert set() not in followed.lists
    followed.put("a", "10.0.0.3")
    await followed.hear("10.0.0.3")


async def test_bookmarks_change_nothing(followed: Followed) -> None:
    """A bookmark carries a version and no endpoints: the list stays, and so does the watch."""
    await followed.hear("10.0.0.1")
    followed.server.say({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "999"}}})
    followed.put("b", "10.0.0.2")
    await followed.hear("10.0.0.1", "10.0.0.2")
    assert len(followed.lists) == 2
    assert followed.server.lists == 1


@pytest.mark.parametrize(
    "answer",
    [500, 403, 429, b"", b"not json", b"[]", {"items": []}, {"metadata": {"resourceVersion": "1"}, "items": [{}]}],
    ids=str,
)
async def test_a_wrong_answer_empties_nothing(followed: Followed, answer: Any) -> None:
    """Errors and nonsense in place of a list leave the last one in place, until a good one comes."""
    await followed.settled()
    followed.server.answers = [answer, answer]
    followed.put("a", "10.0.0.2", told=False)
    followed.server.cut_watches()
    await followed.hear("10.0.0.2")
    assert followed.server.answers == []
    assert followed.lists == [addresses("10.0.0.1"), addresses("10.0.0.2")]


@pytest.mark.parametrize("event", [{}, {"type": "MODIFIED", "object": {}}, {"type": "ADDED"}, [], None], ids=str)
async def test_nonsense_in_a_watch_empties_nothing(followed: Followed, event: Any) -> None:
    """An event that is none ends the watch, not the following."""
    await followed.settled()
    followed.server.say(event)
    await followed.server.until(lambda server: server.watches >= 2)
    followed.put("a", "10.0.0.2")
    await followed.hear("10.0.0.2")
    assert set() not in followed.lists


@pytest.mark.parametrize("outage_s", [1.5, pytest.param(60.0, marks=pytest.mark.long)])
async def test_an_outage_keeps_the_last_list(followed: Followed, outage_s: float) -> None:
    """Nobody answers for a while: the pods that were known stay known; what changed meanwhile is heard afterwards."""
    await followed.settled()
    await asyncio.to_thread(followed.server.stop)
    # The outage itself: its length is what is tested.
    await asyncio.sleep(outage_s)
    assert followed.lists == [addresses("10.0.0.1")]
    followed.put("a", "10.0.0.2", "10.0.0.3", told=False)
    followed.server.start()
    await followed.hear("10.0.0.2", "10.0.0.3")


async def test_a_server_that_is_not_there_yet_is_waited_for(server: ApiServer) -> None:
    """A router that starts before the API server answers gets its first list when there is one."""
    server.stop()
    async with following(server) as followed:
        await asyncio.sleep(0.3)
        assert followed.lists == []
        server.start()
        await followed.hear("10.0.0.1")


async def test_a_silent_watch_is_let_go(followed: Followed) -> None:
    """Following can be ended at any time, also while the watch says nothing, and leaves no thread behind."""
    await followed.settled()


async def test_a_watch_that_is_answered_too_late_is_let_go(server: ApiServer) -> None:
    """Following ends while the server thinks about a watch: its answer, which never ends by itself, holds no thread."""
    server.answers_watches.clear()
    async with following(server, watch_s=3600) as followed:
        await followed.settled()
        threading.Timer(0.3, server.answers_watches.set).start()


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


async def test_outside_a_cluster_the_kubeconfig_says_where_it_is(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A router on somebody's own machine finds the pods of the cluster that kubectl would ask."""
    path = tmp_path / "config"
    path.write_text(json.dumps(kubeconfig(server.port)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    await yields(parse_source([f"k8s:///serving/{SERVICE}:7100"], 1, 5), addresses("10.0.0.1"))


async def test_it_joins_other_sources(server: ApiServer) -> None:
    """A static address beside a watched Service: the union of both."""
    joined = JoinedPeers((StaticPeers(frozenset({"10.9.9.9:7100"})), source_of(server)))
    await yields(joined, addresses("10.9.9.9", "10.0.0.1"))


async def yields(source: Any, wanted: set[str]) -> None:
    """Soon, and leaves nothing behind."""
    watching = source.watch()
    async with asyncio.timeout(GIVE_UP_S):
        async for found in watching:
            if found == wanted:
                break
    await watching.aclose()
    await no_threads()
