"""Discovery: sources of the address lists of peers. A pool follows one; whatever a source meets, the last list stays.

In a cluster the source is a list and watch of the EndpointSlices of one Service, `k8s:///NAMESPACE/SERVICE:PORT`. A
thread lists and watches; after every watch that ends, however it ends, it lists again, so that an event that was missed
is made up for. An API server that fails or answers nonsense changes nothing: the last list stays until another comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moot.core.errors import ConfigError

_log = logging.getLogger("moot.router.discovery")

K8S_SCHEME = "k8s:///"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

WATCH_S = 60
"""Length of one watch: a server that has gone without a word is noticed no later than this and a little more."""
WATCH_MARGIN_S = 10.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 10.0


@dataclass(slots=True)
class SliceTable:
    """The slices of one Service as last heard of, by name; several slices may name one address."""

    slices: dict[str, frozenset[str]] = field(default_factory=dict)

    def replace(self, listing: Mapping[str, Any]) -> None:
        """Take over a whole EndpointSliceList. Raises KeyError, TypeError or AttributeError for what is none."""
        self.slices = {str(item["metadata"]["name"]): serving_hosts(item) for item in listing["items"] or ()}

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take over one event of a watch. Raises KeyError, TypeError or AttributeError for what is none."""
        kind, item = event["type"], event["object"]
        if kind == "BOOKMARK":
            return
        name = str(item["metadata"]["name"])
        if kind == "DELETED":
            self.slices.pop(name, None)
        else:
            self.slices[name] = serving_hosts(item)

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset().union(*self.slices.values())


def serving_hosts(item: Mapping[str, Any]) -> frozenset[str]:
    """Addresses of the endpoints of one EndpointSlice that serve and are not about to go.

    A condition that is absent means: not terminating; serving as `ready` says; ready.
    """
    if item.get("addressType") == "FQDN":
        return frozenset()
    found: set[str] = set()
    for endpoint in item.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        ready = conditions.get("ready")
        serving = conditions.get("serving")
        serves = serving if serving is not None else (ready is None or ready)
        if serves and not conditions.get("terminating"):
            found.update(endpoint.get("addresses") or ())
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class SlicePeers:
    """The pods behind one Service. `api`: a kubernetes.client.DiscoveryV1Api. Durations in seconds."""

    api: Any
    namespace: str
    service: str
    port: int
    timeout_s: float
    watch_s: int = WATCH_S
    backoff_max_s: float = BACKOFF_MAX_S

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        follower = _Follower(self, asyncio.get_running_loop())
        threading.Thread(target=follower.run, name=f"endpoints {self.service}", daemon=True).start()
        known: frozenset[str] | None = None
        try:
            while True:
                await follower.changed.wait()
                follower.changed.clear()
                if (latest := follower.latest) is not None and latest != known:
                    known = latest
                    yield latest
        finally:
            follower.stop()

    def addresses(self, hosts: frozenset[str]) -> frozenset[str]:
        return frozenset(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in hosts)


class _Follower:
    """The thread's side: what it hears is put into `latest`, and `changed` is set on the loop."""

    def __init__(self, peers: SlicePeers, loop: asyncio.AbstractEventLoop) -> None:
        self.latest: frozenset[str] | None = None
        self.changed = asyncio.Event()
        self._peers = peers
        self._loop = loop
        self._table = SliceTable()
        self._stopped = threading.Event()
        self._response: Any = None
        """The latest answer, which may be being read."""

    def stop(self) -> None:
        """Stop the thread, from the loop's thread: a read that waits is ended."""
        self._stopped.set()
        # An answer that is over, or whose connection is gone, is as good.
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            self._response.shutdown()

    def run(self) -> None:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        backoff_s = BACKOFF_MIN_S
        while not self._stopped.is_set():
            try:
                version = self._list()
                backoff_s = BACKOFF_MIN_S
                self._watch(version)
            except (
                ApiException,
                urllib3.exceptions.HTTPError,
                OSError,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
            ) as error:
                # The last ones: an answer that is no list of slices. Whatever it was, what is known stays.
                if self._stopped.is_set():
                    return
                facts = {
                    "service_asked": self._peers.service,
                    "cause": type(error).__name__,
                    "status": getattr(error, "status", None),
                }
                _log.warning("cannot watch endpoints", extra=facts)
                self._stopped.wait(random.uniform(0.5, 1.0) * backoff_s)
                backoff_s = min(2 * backoff_s, self._peers.backoff_max_s)

    def _list(self) -> str:
        """Take over the whole list; returns its resource version."""
        with contextlib.closing(self._ask(self._peers.timeout_s, _preload_content=False)) as response:
            listing = json.loads(response.data)
        version = str(listing["metadata"]["resourceVersion"])
        self._table.replace(listing)
        self._publish()
        return version

    def _watch(self, version: str) -> None:
        """Take over events until the server ends the watch."""
        from kubernetes.watch import Watch

        for event in Watch().stream(
            self._ask,
            timeout_s=self._peers.watch_s + WATCH_MARGIN_S,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=self._peers.watch_s,
        ):
            self._table.apply(event)
            self._publish()

    def _ask(self, timeout_s: float, **parameters: Any) -> Any:
        """Ask the API server; the answer's body is still to be read. `timeout_s`: longest silence of the server.

        A watch makes a model of each event if this says which, and leaves it as it is where this says nothing.
        """
        self._response = response = self._peers.api.list_namespaced_endpoint_slice(
            self._peers.namespace,
            label_selector=f"kubernetes.io/service-name={self._peers.service}",
            _request_timeout=(self._peers.timeout_s, timeout_s),
            **parameters,
        )
        if self._stopped.is_set():
            # It was on its way when following ended: `stop` had nothing to end.
            response.close()
            raise ConnectionAbortedError("nobody follows any more")
        return response

    def _publish(self) -> None:
        addresses = self._peers.addresses(self._table.hosts)
        if addresses == self.latest:
            return
        self.latest = addresses
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.changed.set)


def parse_slices(entry: str, timeout_s: float, api: Any = None) -> SlicePeers:
    """The source of a `k8s:///NAMESPACE/SERVICE:PORT` entry. Raises ConfigError naming the bad entry, or where no
    cluster can be found."""
    names, _, port = entry.removeprefix(K8S_SCHEME).rpartition(":")
    namespace, _, service = names.partition("/")
    good = port.isdigit() and 0 < int(port) < 65536 and _NAME.fullmatch(namespace) and _NAME.fullmatch(service)
    if not good:
        raise ConfigError(f"{entry!r} is not {K8S_SCHEME}NAMESPACE/SERVICE:PORT")
    return SlicePeers(api or _cluster_api(), namespace, service, int(port), timeout_s)


def _cluster_api() -> Any:
    """The API of the cluster that this pod is in, or else of the user's kubeconfig."""
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise ConfigError(
                f"{K8S_SCHEME} needs a cluster: no service account in this pod, and no kubeconfig"
            ) from error
    # This module does its own: the library's would hide for how long a server has been gone.
    configuration.retries = False
    return client.DiscoveryV1Api(client.ApiClient(configuration))


DNS_SCHEME = "dns:///"


class PeerSource(Protocol):
    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Address lists as host:port, one now and one after every change. Never raises for a failed look-up."""
        ...


@dataclass(frozen=True, slots=True)
class StaticPeers:
    """A list that never changes."""

    addresses: frozenset[str]

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self.addresses


@dataclass(frozen=True, slots=True)
class DnsPeers:
    """All addresses of a name (a headless service), looked up again and again."""

    name: str
    port: int
    interval_s: float
    timeout_s: float

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        while True:
            found = await self._look_up()
            if found and found != known:
                known = found
                yield found
            await asyncio.sleep(self.interval_s)

    async def _look_up(self) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                entries = await loop.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:  # the last: a name that no name server can have
            _log.warning("look-up failed", extra={"name_asked": self.name, "cause": type(error).__name__})
            return frozenset()
        hosts = (str(entry[4][0]) for entry in entries)
        return frozenset(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in hosts)


@dataclass(frozen=True, slots=True)
class JoinedPeers:
    """The union of several sources."""

    sources: tuple[PeerSource, ...]

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        lists: list[frozenset[str]] = [frozenset()] * len(self.sources)
        changed = asyncio.Event()

        async def follow(index: int) -> None:
            try:
                async for addresses in self.sources[index].watch():
                    lists[index] = addresses
                    changed.set()
            finally:
                changed.set()

        tasks = [asyncio.create_task(follow(index)) for index in range(len(self.sources))]
        try:
            known: frozenset[str] | None = None
            while True:
                await changed.wait()
                changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()
                joined = frozenset().union(*lists)
                if joined != known:
                    known = joined
                    yield joined
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def parse_source(addresses: Sequence[str], interval_s: float, timeout_s: float) -> PeerSource:
    """The source of host:port, dns:///name:port and k8s:///namespace/service:port entries. Raises ConfigError naming
    the bad one."""
    static = frozenset(_checked(entry) for entry in addresses if not entry.startswith((DNS_SCHEME, K8S_SCHEME)))
    sources: list[PeerSource] = [StaticPeers(static)] if static else []
    for entry in addresses:
        if entry.startswith(DNS_SCHEME):
            name, _, port = _checked(entry.removeprefix(DNS_SCHEME)).rpartition(":")
            sources.append(DnsPeers(name, int(port), interval_s, timeout_s))
        elif entry.startswith(K8S_SCHEME):
            sources.append(parse_slices(entry, timeout_s))
    return sources[0] if len(sources) == 1 else JoinedPeers(tuple(sources))


def parse_drafters(entries: Iterable[str]) -> dict[str, list[str]]:
    """The sources of `id=address|address` entries, by drafter id. Raises ConfigError naming the bad one."""
    drafters: dict[str, list[str]] = {}
    for entry in entries:
        drafter_id, separator, rest = entry.partition("=")
        addresses = [address for address in rest.split("|") if address]
        if not separator or not drafter_id or not addresses:
            raise ConfigError(f"--drafters: {entry!r} is not id=host:port|host:port")
        if drafter_id in drafters:
            raise ConfigError(f"--drafters: {drafter_id} is named twice")
        drafters[drafter_id] = addresses
    return drafters


async def follow(source: PeerSource, apply: Callable[[Iterable[str]], Awaitable[None]]) -> None:
    """Keep a pool on its source, for ever."""
    async for addresses in source.watch():
        await apply(addresses)


def _checked(address: str) -> str:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not host:port")
    return address
