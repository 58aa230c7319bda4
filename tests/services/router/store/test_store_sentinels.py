"""Sentinels say where the server of records is: who is believed, and what becomes of records when it is replaced."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError, SentinelConnectionPool

from moot.core.errors import ConfigError, StoreUnavailable
from moot.core.options import make_config
from services.router.config import RouterConfig
from services.router.store import StoreConfig
from services.router.store.connection import RedisConnection, Sentinels, pool_of
from tests.integration.sentinel_group import MASTER, Group
from tests.integration.store_certificates import make_certificates
from tests.services.router.store.store_server import Server, begin, from_server, opened, record, synced
from tests.waiting import GIVE_UP_S, eventually


def sentinel_config(group: Group, **changes: Any) -> StoreConfig:
    values = {
        "url": "redis://:serverword@anything/0",
        "sentinels": group.addresses,
        "sentinel_master": MASTER,
        "sentinel_password": "sentinelword",
        "upkeep_interval_s": 0.05,
        "timeout_s": 5.0,
        "connect_timeout_s": 5.0,
    }
    return StoreConfig(**(values | changes))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """With passwords. One test, the last of those that use it, kills its master."""
    made = Group(tmp_path_factory.mktemp("group"), password="serverword", sentinel_password="sentinelword")
    yield made
    made.close()


async def test_passwords_of_servers_and_sentinels_are_their_own(group: Group) -> None:
    """The url's is the servers'; a wrong one, of either, is an unreachable store, and no error."""
    async with opened(sentinel_config(group)) as store:
        assert await store.create(record("first"))
    for wrong in ({"sentinel_password": "other"}, {"sentinel_password": None}, {"url": "redis://:other@anything"}):
        async with opened(sentinel_config(group, **wrong)) as store:
            assert not store.up
            with pytest.raises(StoreUnavailable):
                await store.load("first")


async def test_after_a_failover_the_new_master_gets_what_it_missed(group: Group) -> None:
    """C29: the master dies, and its last commits with it: nothing is raised into running requests, commits go to the
    replica that follows it, and every record is whole there."""
    async with opened(sentinel_config(group)) as store:
        assert store.up
        assert await begin(store, [1, 2])
        await eventually(lambda: group.servers[1].client().exists("moot:{r1}"))
        go_on = group.lose_the_tail()
        assert await store.commit("r1", 1, 2, [3, 4])
        group.servers[0].kill()
        go_on()
        assert group.servers[1].client().xlen("moot:{r1}:t") == 1, "the last commit got through"
        assert not await store.commit("r1", 1, 4, [5])
        assert not await store.create(record("r2"))
        await asyncio.to_thread(group.wait_failover)
        await synced(store)
        assert await store.commit("r1", 1, 5, [6])
        assert await store.create(record("r3"))
    there = StoreConfig(url=f"redis://:serverword@127.0.0.1:{group.servers[1].port}", timeout_s=GIVE_UP_S)
    assert await from_server(there) == record(output_token_ids=(1, 2, 3, 4, 5, 6))
    for other in ("r2", "r3"):
        assert await from_server(there, other) == record(other)


@asynccontextmanager
async def told(*answers: str | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[list[tuple[str, int]]]:
    """The addresses of servers that answer like sentinels, each what it is told: `host:port`, None for an unknown name,
    or "silent"."""
    servers = [
        await asyncio.start_server(lambda r, w, answer=answer: speak(r, w, answer), "127.0.0.1", 0, ssl=tls)
        for answer in answers
    ]
    yield [server.sockets[0].getsockname()[:2] for server in servers]
    for server in servers:
        server.close()


async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: str | None) -> None:
    """Every command gets the answer, as SENTINEL GET-MASTER-ADDR-BY-NAME has it; others a word."""
    try:
        while (line := await reader.readline()).startswith(b"*"):
            words = [(await reader.readline(), await reader.readline())[1].strip() for _ in range(int(line[1:]))]
            if answer == "silent":
                continue
            if words[0] != b"SENTINEL":
                writer.write(b"+PONG\r\n")
            elif answer is None:
                writer.write(b"*-1\r\n")
            else:
                host, port = answer.encode().split(b":")
                writer.write(b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(host), host, len(port), port))
    except ConnectionError:
        pass  # the caller had what it wanted
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        (("a:1", "a:1", "b:2"), ("a", 1)),
        (("b:2", "a:1", "a:1"), ("a", 1)),
        (("silent", "a:1", "a:1"), ("a", 1)),
        ((None, "a:1", "silent"), ("a", 1)),
        (("a:1",), ("a", 1)),
        ((None, None, None), None),
        (("silent", "silent"), None),
    ],
    ids=str,
)
async def test_most_sentinels_are_believed(answers: tuple[str | None, ...], named: tuple[str, int] | None) -> None:
    """One that was cut off and still names the old master is outvoted; one that says nothing holds nobody up for
    longer than the bound, and nobody at all where the others agree."""
    async with told(*answers) as addresses:
        enough = answers.count("a:1") * 2 > len(answers)
        sentinels = Sentinels(addresses, 3600.0 if enough else 1.0, protocol=2, driver_info=None)
        if named is None:
            with pytest.raises(MasterNotFoundError):
                await sentinels.discover_master(MASTER)
        else:
            async with asyncio.timeout(GIVE_UP_S):
                assert await sentinels.discover_master(MASTER) == named


async def test_sentinels_speak_tls_as_the_server_does(tmp_path: Path) -> None:
    """rediss://: sentinels, too, must prove who they are by the same authority."""
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ours / "tls.crt", ours / "tls.key")
    async with (
        told(None, tls=context) as [(_, port)],
        told(f"127.0.0.1:{port}", tls=context) as [(_, sentinel_port)],
    ):
        for certificates in (ours, theirs):
            url = f"rediss://anything/0?ssl_ca_certs={certificates / 'ca.crt'}"
            connection = RedisConnection(
                StoreConfig(
                    url=url,
                    sentinels=(f"127.0.0.1:{sentinel_port}",),
                    sentinel_master=MASTER,
                    timeout_s=GIVE_UP_S,
                    connect_timeout_s=GIVE_UP_S,
                )
            )
            if certificates is ours:
                assert await connection.send([("PING",)]) in (["PONG"], [b"PONG"])
            else:
                with pytest.raises(MasterNotFoundError):
                    await connection.send([("PING",)])
            await connection.drop()


async def test_a_server_that_follows_another_takes_no_commit(server: Server, tmp_path: Path) -> None:
    """C29: the server behind the address becomes a replica: the store is down and says so, steadily; when it is a
    master again, emptied by the one that it followed, the record is whole."""
    (tmp_path / "other").mkdir()
    other = Server(tmp_path / "other")
    changes: list[bool] = []
    try:
        async with opened(server, changes.append) as store:
            assert await store.create(record())
            server.client().replicaof("127.0.0.1", other.port)
            assert not await store.commit("r1", 1, 0, [1, 2])
            await asyncio.sleep(0.3)  # several probes: none of them may take it for a server
            assert changes == [True, False]
            server.client().replicaof("NO", "ONE")
            await synced(store)
            assert await store.commit("r1", 1, 2, [3])
        assert await from_server(server) == record(output_token_ids=(1, 2, 3))
    finally:
        other.kill()


MISTAKES = {
    "sentinels without a name": ({"redis_sentinels": ("a:1",)}, "go together"),
    "a name without sentinels": ({"redis_sentinel_master": "m"}, "go together"),
    "no port": ({"redis_sentinels": ("a",), "redis_sentinel_master": "m"}, "'a' is not host:port"),
    "a port of letters": ({"redis_sentinels": ("a:b",), "redis_sentinel_master": "m"}, "'a:b' is not host:port"),
    "a user without password": (
        {"redis_sentinels": ("a:1",), "redis_sentinel_master": "m", "redis_sentinel_username": "u"},
        "--redis-sentinel-username needs --redis-sentinel-password",
    ),
    "a password for nobody": (
        {"redis_url": "redis://a", "redis_sentinel_password": "p"},
        "--redis-sentinel-password needs --redis-sentinels",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_flags_that_do_not_fit_are_refused(mistake: str) -> None:
    """Each mistake is a ConfigError that names the flag."""
    flags, words = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=words):
        make_config(RouterConfig, model="m", verifiers=("h:1",), **flags)


async def test_the_flags_reach_the_store() -> None:
    """Without --redis-url the server has no password; IPv6 in brackets is an address."""
    flags = {"redis_sentinels": ("[fd00::1]:26379", "b:26379"), "redis_sentinel_master": "m"}
    made = make_config(RouterConfig, model="m", verifiers=("h:1",), redis_sentinel_password="p", **flags).store
    assert made.keeps_records
    assert (made.server_url, made.sentinel_master, made.sentinel_password) == ("redis://", "m", "p")
    assert "'p'" not in repr(made)
    assert isinstance(pool_of(made), SentinelConnectionPool)
    with pytest.raises(ConfigError, match="unix://"):
        RedisConnection(StoreConfig(url="unix:///x", sentinels=("a:1",), sentinel_master="m"))
