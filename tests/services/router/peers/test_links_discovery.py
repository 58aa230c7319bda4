"""Where peers are: what the flags say, and lists that change or fail while the router runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from moot.core.errors import ConfigError
from moot.drafters.interface import parse_entries
from services.router.peers.discovery import DnsPeers, JoinedPeers, StaticPeers, follow, parse_drafters, parse_source
from tests.waiting import eventually


def test_drafters_are_read_with_their_replicas() -> None:
    """`id=host:port|host:port` entries; a wrong one is named in the error."""
    assert parse_drafters(["a=h:1|h:2", "b=h:3"]) == {"a": ["h:1", "h:2"], "b": ["h:3"]}
    for wrong in ("a", "=h:1", "a="):
        with pytest.raises(ConfigError, match="drafters"):
            parse_drafters([wrong])
    with pytest.raises(ConfigError, match="twice"):
        parse_drafters(["a=h:1", "a=h:2"])


def test_local_drafters_are_read_with_their_options() -> None:
    """`[id=]kind[:option=value]...`."""
    (plain, named) = parse_entries(["suffix", "mine=ngram:table=/t:order=3"], "--in-process-drafters")
    assert (plain.drafter_id, plain.kind, plain.options) == ("suffix", "suffix", {})
    assert (named.drafter_id, named.kind, named.options) == ("mine", "ngram", {"table": "/t", "order": "3"})
    for wrong in (["=suffix"], ["suffix:x"], ["suffix", "suffix"], ["x="]):
        with pytest.raises(ConfigError):
            parse_entries(wrong, "--in-process-drafters")


@pytest.mark.parametrize("wrong", ["host", "host:", ":80", "host:http", "host:0", "dns:///host"])
def test_a_wrong_address_is_named(wrong: str) -> None:
    """An address without host or port is a usage error that quotes it."""
    with pytest.raises(ConfigError, match="host:port"):
        parse_source([wrong], 1, 1)


async def test_dns_names_are_looked_up() -> None:
    """All addresses of a name, with the port that was given."""
    source = parse_source(["dns:///localhost:7100"], 60, 5)
    addresses = await anext(source.watch())
    assert addresses & {"127.0.0.1:7100", "[::1]:7100"}


@pytest.mark.parametrize("name", ["no-such-name.invalid", "x" * 70 + ".invalid"], ids=["unknown", "no name"])
async def test_a_failed_look_up_keeps_the_last_list(name: str) -> None:
    """Nothing is yielded for a name that cannot be resolved, or cannot be: whoever follows keeps what it has, and
    the look-ups go on."""
    unknown = DnsPeers(name, 1, interval_s=0.01, timeout_s=0.5)
    applied: list[frozenset[str]] = []

    async def apply(addresses: frozenset[str]) -> None:
        applied.append(addresses)

    joined = JoinedPeers((StaticPeers(frozenset({"h:1"})), unknown))
    task = asyncio.create_task(follow(joined, apply))
    await eventually(lambda: applied)
    await asyncio.sleep(0.1)  # some look-ups
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert applied == [frozenset({"h:1"})]


class Changing:
    """A source that has a new list whenever it is told."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self.lists.get()


async def test_joined_sources_yield_their_union() -> None:
    """A change of one source keeps what the others said last."""
    first, second = Changing(), Changing()
    watching = JoinedPeers((first, second)).watch()
    first.lists.put_nowait(frozenset({"a:1"}))
    assert await anext(watching) == {"a:1"}
    second.lists.put_nowait(frozenset({"b:1"}))
    assert await anext(watching) == {"a:1", "b:1"}
    first.lists.put_nowait(frozenset({"a:2"}))
    assert await anext(watching) == {"a:2", "b:1"}
    await watching.aclose()
