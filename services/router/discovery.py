"""Where peers are: sources of address lists. A pool follows one; whatever a source meets, the last list stays."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moot.core.errors import ConfigError
from services.router.endpoint_slices import K8S_SCHEME, parse_slices

_log = logging.getLogger("moot.router.discovery")

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
    """host:port, dns:///name:port and k8s:///namespace/service:port entries. Raises ConfigError naming the bad one."""
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
    """`id=address|address` entries by drafter id. Raises ConfigError naming the bad one."""
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
