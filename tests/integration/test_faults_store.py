"""C29: the server of records dies, freezes, is full, forgets or comes back: running requests do not care, new ones are
told; it is replaced by its replica; and a request that outlives its router goes on from its record alone."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moot.core.errors import CommitFenced, LeaseHeld
from moot.core.options import make_config
from moot.core.types import FinishReason
from moot.runtime.metrics import Metrics
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from services.router.api.text import IncrementalText
from services.router.api.tokenization import TokenBytes
from services.router.config import RouterConfig
from services.router.generation.request_types import GenerationRequest, RequestRecord
from services.router.generation.rounds import Rounds, ServedModel
from services.router.lifecycle import Peers
from services.router.store import DurableStore, open_store
from tests.integration.asking import Ask, Reply, assert_same
from tests.integration.faulty import Rig, body, system_rig
from tests.integration.processes import Process, equal_to, wait_metric
from tests.integration.sentinel_group import Group
from tests.integration.store_process import Store, assert_recorded
from tests.integration.whole_system import System
from tests.waiting import GIVE_UP_S, until

# Router 0 in mode `degrade`, router 1 in mode `required`.
rig = system_rig("store", drafters=("suffix",), store=True, also=("--store-mode", "required"))


@pytest.fixture
def store(rig: Rig) -> Store:
    assert rig.system.store is not None
    return rig.system.store


def wait_store(rig: Rig, *, up: bool) -> None:
    for router in rig.system.routers:
        wait_metric(router, "moot_state_store_up", equal_to(up))
        wait_metric(router, "moot_degraded", equal_to(not up), mode="store")


def restart(store: Store) -> None:
    store.kill()
    store.restart()


def blink(store: Store) -> None:
    store.freeze()
    store.thaw()


def empty_and_restart(store: Store) -> None:
    """A server that has lost everything, its functions too."""
    store.kill()
    shutil.rmtree(store.folder / "appendonlydir")
    store.restart()


def flush(store: Store) -> None:
    store.client().flushall()


def forget_functions(store: Store) -> None:
    client = store.client()
    client.flushall()
    client.execute_command("FUNCTION", "FLUSH")


AWAY: dict[str, Callable[[Store], None]] = {"killed": Store.kill, "frozen": Store.freeze}
BACK_AT_ONCE: dict[str, Callable[[Store], None]] = {
    "restarted": restart,
    "emptied": empty_and_restart,
    "flushed": flush,
    "without functions": forget_functions,
    "frozen for a moment": blink,
}


def lost_and_found(rig: Rig, store: Store, lose: Callable[[], Any], find: Callable[[], Any]) -> None:
    """Lost in mid-stream: running requests finish right, new ones are served and told that they are not durable, mode
    `required` refuses new ones; then every missing tail is written, and new requests have a record again."""
    degrade, required = rig.system.routers
    bodies = [body(index) for index in range(3)]
    expected = rig.all_expected(bodies)
    asks = [Ask(router.port, asked) for router in (degrade, required) for asked in bodies]
    for ask in asks:
        ask.wait_tokens(4)
    lose()
    replies = [ask.result() for ask in asks]
    for reply, right in zip(replies, expected * 2, strict=True):
        assert_same(reply, right)
        assert "x-moot-durable" not in reply.headers, "it was durable when it began"
    for stream in (True, False):
        replies.append(Ask(degrade.port, body(1), stream=stream).result())
        assert_same(replies[-1], expected[1])
        assert replies[-1].headers["x-moot-durable"] == "false"
    Ask(required.port, body(1), stream=False).result().assert_refused(503, "no_capacity")
    rig.system.assert_idle()

    find()
    for reply in replies:
        assert_recorded(store.url, reply)
    assert_same(until(lambda: ask_durably(required), "new requests have a record again"), expected[2])


def ask_durably(router: Process) -> Reply | None:
    reply = Ask(router.port, body(2)).result()
    return reply if reply.status == 200 and "x-moot-durable" not in reply.headers else None


@pytest.mark.parametrize("how", AWAY)
def test_without_the_server_requests_run_and_are_repaired_later(rig: Rig, store: Store, how: str) -> None:
    """C29: dead or frozen; a gauge says so, and when it is over."""

    def lose() -> None:
        AWAY[how](store)
        wait_store(rig, up=False)

    def find() -> None:
        store.thaw() if how == "frozen" else store.restart()
        wait_store(rig, up=True)

    lost_and_found(rig, store, lose, find)
    assert ask_durably(rig.system.routers[1]), "what is up takes every request"


@pytest.mark.parametrize("how", BACK_AT_ONCE)
def test_a_server_that_forgets_is_told_again(rig: Rig, store: Store, how: str) -> None:
    """C29: restarted, emptied or flushed in mid-stream: same text, and the record is whole in the end."""
    for reply in rig.through(lambda: BACK_AT_ONCE[how](store)):
        assert_recorded(store.url, reply)


def test_a_full_server_refuses_records_and_no_request(rig: Rig, store: Store) -> None:
    """C29: as one that is away, and it is there again with room."""
    client = store.client()
    room = client.config_get("maxmemory")["maxmemory"]
    lost_and_found(rig, store, lambda: client.config_set("maxmemory", 1), lambda: client.config_set("maxmemory", room))


def test_every_key_has_a_time_to_live(rig: Rig, store: Store) -> None:
    """Whatever becomes of a request, its record does not stay for ever."""
    going = rig.ask(body(0, max_tokens=200))
    going.wait_tokens(5)
    gone = rig.ask(body(1, max_tokens=200))
    gone.wait_tokens(5)
    gone.give_up()
    done = rig.ask_right(2)
    client = store.client()
    keys = list(client.scan_iter())
    assert any(done.request_id in key.decode() for key in keys)
    assert all(client.pttl(key) > 0 for key in keys)
    going.give_up()


@pytest.fixture
def group(rig: Rig, tmp_path: Path) -> Iterator[Group]:
    """With two more routers, in mode `degrade` and `required`, whose records it has."""
    made = Group(tmp_path)
    flags = ("--redis-url", "redis://the.sentinels.say/0", *made.flags, "--store-mode")
    routers = [rig.system.add_router((*flags, mode)) for mode in ("degrade", "required")]
    yield made
    for router in routers:
        router.kill()
    made.close()


def is_durable(reply: Reply) -> bool:
    return reply.status == 200 and "x-moot-durable" not in reply.headers


def test_a_failover_in_mid_stream_fails_no_request(rig: Rig, group: Group) -> None:
    """C29: the master freezes, as one that is cut off, while requests run: they finish right, new ones are served (mode
    `required`: refused with Retry-After until there is a master); then commits go to the new master, which has every
    token of every request, and the old one, when it wakes, gets nothing."""
    degrade, required = routers = rig.system.routers[-2:]
    for router in routers:
        wait_metric(router, "moot_state_store_up", equal_to(1))
    bodies = [body(index, max_tokens=150) for index in range(3)]
    expected = rig.all_expected(bodies)
    later, later_right = body(4, max_tokens=30), rig.expected(body(4, max_tokens=30))
    streams = [Ask(router.port, asked) for router in routers for asked in bodies[:2]]
    wholes = [Ask(router.port, bodies[2], stream=False) for router in routers]
    for ask in streams:
        ask.wait_tokens(4)
    old = group.servers[0]
    old.send(signal.SIGSTOP)
    for router in routers:
        wait_metric(router, "moot_state_store_up", equal_to(0))
    meanwhile = Ask(degrade.port, later).result()
    assert_same(meanwhile, later_right)
    refused = Ask(required.port, later, stream=False).result()
    if not is_durable(refused):
        refused.assert_refused(503, "no_capacity")
    replies = [ask.result() for ask in (*streams, *wholes)]
    for reply, right in zip(replies, (*expected[:2] * 2, *expected[2:] * 2), strict=True):
        assert_same(reply, right)

    group.wait_failover()
    master = f"redis://127.0.0.1:{group.servers[1].port}"
    for router in routers:
        wait_metric(router, "moot_state_store_up", equal_to(1))
    for reply in (*replies, meanwhile):
        assert_recorded(master, reply)
    old.send(signal.SIGCONT)
    until(lambda: old.client().info("replication")["role"] == "slave", "the old master follows the new one")
    for router in routers:
        durable = Ask(router.port, later).result()
        assert_same(durable, later_right)
        assert is_durable(durable)
        assert_recorded(master, durable)


LEASE_S = 3.0
LEASE = ("--store-lease-s", str(LEASE_S))
"""How long an owner may be silent."""


@dataclass(frozen=True, slots=True)
class FreshRouter:
    """What a router process is made of, in this process, knowing nothing of any request."""

    rounds: Rounds
    store: DurableStore
    text: TokenBytes

    async def claim(self, request_id: str) -> RequestRecord:
        """As soon as the lease of the owner is over."""
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                try:
                    return await self.store.claim(request_id)
                except LeaseHeld as error:
                    await asyncio.sleep(error.retry_after_s)

    async def assert_ended(self, request_id: str, right: Reply) -> None:
        record = await self.store.load(request_id)
        assert record is not None
        assert list(record.output_token_ids) == right.token_ids
        assert record.finish_reason is FinishReason.LENGTH

    async def remainder(self, record: RequestRecord) -> tuple[list[int], str]:
        """The rest of the output of a claimed record: ids, and the text of the whole."""
        request = GenerationRequest(
            request_id=record.request_id,
            prompt_token_ids=record.prompt_token_ids,
            params=record.params,
            num_speculative_tokens=3,
            output_token_ids=record.output_token_ids,
            stop_strings=record.stop_strings,
            skip_special_tokens=record.skip_special_tokens,
            include_stop_str_in_output=record.include_stop_str_in_output,
            epoch=record.epoch,
        )
        # The end tokens do not matter here: no request of these tests may end by one.
        assembler = IncrementalText.of(request, self.text, frozenset())
        shown = assembler.push(record.output_token_ids).text
        ids: list[int] = []
        async for chunk in self.rounds.generate(request, assembler):
            assert chunk.durable
            ids.extend(chunk.token_ids)
            shown += chunk.text
        return ids, shown


@asynccontextmanager
async def fresh_router(system: System) -> AsyncIterator[FreshRouter]:
    assert system.store is not None
    config = make_config(
        RouterConfig,
        model=str(system.model),
        verifiers=tuple(process.address for process in system.verifiers),
        drafters=tuple(f"{name}={process.address}" for name, process in system.drafters.items()),
        redis_url=system.store.url,
        store_lease_s=LEASE_S,
        keepalive_time_ms=1000,
        keepalive_timeout_ms=5000,
    )
    tokenizer, metrics = load_tokenizer(config.model), Metrics()
    peers = Peers(config, tokenizer, metrics)
    store = await open_store(config.store)
    assert isinstance(store, DurableStore)
    model = ServedModel("tiny", tokenizer_fingerprint(tokenizer))
    peers.start()
    try:
        rounds = Rounds(peers.targets, peers.drafter_set, store, model, metrics, config.max_buffered_commits)
        yield FreshRouter(rounds, store, TokenBytes(tokenizer))
        assert rounds.num_running == 0
    finally:
        await peers.close()
        await store.close()


def test_a_dead_routers_request_goes_on_elsewhere(rig: Rig) -> None:
    """The record alone gives the identical remainder, and holds everything that the client was shown."""
    right = rig.expected(body(1, max_tokens=300))
    owner = rig.system.add_router(LEASE)
    ask = Ask(owner.port, body(1, max_tokens=300))
    ask.wait_tokens(10)
    owner.kill()
    seen = ask.result()
    assert not seen.is_complete

    async def go_on() -> tuple[RequestRecord, list[int], str]:
        async with fresh_router(rig.system) as router:
            record = await router.claim(f"{seen.request_id}-0")
            ids, text = await router.remainder(record)
            await router.assert_ended(record.request_id, right)
            return record, ids, text

    record, ids, text = asyncio.run(go_on())
    committed = list(record.output_token_ids)
    assert committed[: len(seen.token_ids)] == seen.token_ids, "committed before it was shown"
    assert 0 < len(ids) < len(right.token_ids), "neither from the start nor at the end"
    assert committed + ids == right.token_ids
    assert text == right.text


def test_a_router_that_wakes_again_is_fenced(rig: Rig) -> None:
    """A frozen router lost its request to another one: its commits are refused, its client gets no token more."""
    right = rig.expected(body(1, max_tokens=300))
    owner = rig.system.add_router(LEASE)
    ask = Ask(owner.port, body(1, max_tokens=300))
    ask.wait_tokens(10)
    owner.freeze()
    frozen_at = time.monotonic()

    async def take_over() -> None:
        async with fresh_router(rig.system) as router:
            record = await router.claim(f"{ask.reply.request_id}-0")
            assert time.monotonic() - frozen_at > LEASE_S / 4, "a living owner was robbed"
            length = len(record.output_token_ids)
            with pytest.raises(CommitFenced):
                await router.store.commit(record.request_id, record.epoch - 1, length, [97])
            owner.thaw()
            seen = await asyncio.to_thread(ask.result)
            assert seen.error is not None, seen
            assert seen.error["code"] == "store"
            assert not seen.is_complete
            assert seen.token_ids == right.token_ids[: len(seen.token_ids)]
            assert len(seen.token_ids) <= length, "shown without a commit"
            ids, _ = await router.remainder(record)
            assert list(record.output_token_ids) + ids == right.token_ids
            await router.assert_ended(record.request_id, right)

    asyncio.run(take_over())
    owner.terminate()
    assert owner.wait() == 0
