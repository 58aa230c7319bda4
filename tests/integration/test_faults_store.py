"""C29: the server of records dies, freezes, is full, forgets or comes back: running requests do not care, new ones are
told. The one that is replaced by its replica: test_faults_failover.py."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator

import pytest

from moot.core.types import FinishReason
from moot.testing.tiny_model import make_tiny_model
from services.router.generation.request_types import RequestRecord
from services.router.store import StoreConfig
from services.router.store.record_server import RedisLink, RedisStore
from tests.integration.asking import Ask, Reply, assert_same
from tests.integration.faulty import STEP_DELAY, Rig, body
from tests.integration.processes import Process, equal_to, wait_metric
from tests.integration.store_process import Store
from tests.integration.whole_system import running
from tests.waiting import GIVE_UP_S, until


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Router 0 in mode `degrade`, router 1 in mode `required`."""
    folder = tmp_path_factory.mktemp("store")
    with running(
        folder / "logs",
        make_tiny_model(folder / "tiny"),
        drafters=("suffix",),
        store=True,
        faults={"verifier-0": STEP_DELAY},
    ) as system:
        system.add_router(("--store-mode", "required"))
        yield Rig(system)


@pytest.fixture(autouse=True)
def whole_again(rig: Rig) -> Iterator[None]:
    yield
    rig.system.assert_idle()
    rig.system.heal()
    for router in rig.system.routers:
        wait_store(router, up=True)


@pytest.fixture
def store(rig: Rig) -> Store:
    assert rig.system.store is not None
    return rig.system.store


def wait_store(router: Process, *, up: bool) -> None:
    wait_metric(router, "moot_state_store_up", equal_to(up))
    wait_metric(router, "moot_degraded", equal_to(not up), mode="store")


def load_record(store: Store, request_id: str) -> RequestRecord | None:
    """The record of a request's first choice, as the server has it."""

    async def load() -> RequestRecord | None:
        config = StoreConfig(url=store.url, timeout_s=GIVE_UP_S)
        link = RedisLink(config)
        try:
            return await RedisStore(link, config).load(f"{request_id}-0")
        finally:
            await link.close()

    return asyncio.run(load())


def assert_recorded(store: Store, reply: Reply) -> None:
    """Soon the record is whole: all tokens, and how it ended."""

    def whole_record() -> RequestRecord | None:
        record = load_record(store, reply.request_id)
        return record if record is not None and record.finish_reason is not None else None

    record = until(whole_record, f"the record of {reply.request_id}")
    assert list(record.output_token_ids) == reply.token_ids
    assert record.finish_reason is FinishReason.LENGTH


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


def begun(rig: Rig) -> tuple[list[Reply], list[Ask]]:
    """Three requests on each router in mid-stream, and their right answers."""
    bodies = [body(index) for index in range(3)]
    expected = rig.all_expected(bodies)
    asks = [Ask(router.port, asked) for router in rig.system.routers for asked in bodies]
    for ask in asks:
        ask.wait_tokens(4)
    return expected, asks


def served_without_records(rig: Rig, right: Reply) -> list[Reply]:
    """What becomes of new requests while the server takes none: served and told so, or in mode `required` refused."""
    degrade, required = rig.system.routers
    replies = []
    for stream in (True, False):
        later = Ask(degrade.port, body(1), stream=stream).result()
        assert_same(later, right)
        assert later.headers["x-moot-durable"] == "false"
        replies.append(later)
    refused = Ask(required.port, body(1), stream=False).result()
    assert refused.status == 503, refused
    assert int(refused.headers["retry-after"]) >= 1
    rig.system.assert_idle()
    return replies


@pytest.mark.parametrize("how", AWAY)
def test_without_the_server_requests_run_and_are_repaired_later(rig: Rig, store: Store, how: str) -> None:
    """C29: lost in mid-stream: running requests finish right, new ones are served and told that they are not durable,
    mode `required` refuses new ones; a gauge says so; when the server is back, every missing tail is written."""
    degrade, required = rig.system.routers
    expected, asks = begun(rig)
    AWAY[how](store)
    replies = [ask.result() for ask in asks]
    for reply, right in zip(replies, expected * 2, strict=True):
        assert_same(reply, right)
        assert "x-moot-durable" not in reply.headers, "it was durable when it began"
    for router in (degrade, required):
        wait_store(router, up=False)
    replies += served_without_records(rig, expected[1])

    store.thaw() if how == "frozen" else store.restart()
    for router in (degrade, required):
        wait_store(router, up=True)
    for reply in replies:
        assert_recorded(store, reply)
    durable = Ask(required.port, body(2)).result()
    assert_same(durable, expected[2])
    assert "x-moot-durable" not in durable.headers


@pytest.mark.parametrize("how", BACK_AT_ONCE)
def test_a_server_that_forgets_is_told_again(rig: Rig, store: Store, how: str) -> None:
    """C29: restarted, emptied or flushed in mid-stream: same text, and the record is whole in the end."""
    for reply in rig.through(lambda: BACK_AT_ONCE[how](store)):
        assert_recorded(store, reply)


def test_a_full_server_refuses_records_and_no_request(rig: Rig, store: Store) -> None:
    """C29: full in mid-stream: running requests finish right, new ones are served and told that they are not durable,
    mode `required` refuses new ones; with room again every missing tail is written."""
    _, required = rig.system.routers
    expected, asks = begun(rig)
    client = store.client()
    room = client.config_get("maxmemory")["maxmemory"]
    client.config_set("maxmemory", 1)
    replies = [ask.result() for ask in asks]
    for reply, right in zip(replies, expected * 2, strict=True):
        assert_same(reply, right)
    replies += served_without_records(rig, expected[1])

    client.config_set("maxmemory", room)
    for reply in replies:
        assert_recorded(store, reply)
    durable = until(lambda: ask_durably(required), "new requests have a record again")
    assert_same(durable, expected[2])


def ask_durably(router: Process) -> Reply | None:
    reply = Ask(router.port, body(2)).result()
    return reply if reply.status == 200 and "x-moot-durable" not in reply.headers else None


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
