"""C29: the server killed, restarted, frozen, full, flushed in the middle of requests. Running requests go on, and
afterwards their records are whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from moot.core.errors import CommitConflict, CommitFenced, CommitTerminal, NoCapacity, StoreUnavailable
from moot.core.types import FinishReason
from services.router.store import DurableStore
from tests.services.router.store.store_server import (
    FROZEN,
    Server,
    begin,
    claimed,
    from_server,
    opened,
    record,
    synced,
)
from tests.waiting import eventually

STOP = FinishReason.STOP
OUTAGES: dict[str, tuple[Callable[[Server], object], Callable[[Server], object]]] = {
    "restart": (Server.kill, Server.start),
    "freeze": (Server.freeze, Server.thaw),
    "flush": (lambda server: server.client().flushall(), lambda server: None),
    "full": (lambda server: server.limit("1"), lambda server: server.limit()),
}
"""How each begins and ends."""


@pytest.mark.parametrize("mode", ["degrade", "required"])
@pytest.mark.parametrize("outage", OUTAGES)
async def test_running_requests_go_on_and_are_repaired(server: Server, outage: str, mode: str) -> None:
    """No outage raises into a running request; once the server is back it has every token, without being asked."""
    set_off, end = OUTAGES[outage]

    async def eventually_durable(store: DurableStore) -> bool:
        if await store.commit("r1", 1, 4, [5]):
            return True
        await synced(store)
        return await store.commit("r1", 1, 4, [5])

    async with opened(server, mode=mode, **FROZEN) as store:
        for request_id in ("r1", "r2", "r3"):
            assert await begin(store, [1, 2], request_id=request_id)
        set_off(server)
        durable = [await store.commit("r1", 1, 2, [3]), await store.commit("r1", 1, 3, [4])]
        durable.append(await store.commit("r2", 1, 2, [9], STOP))
        if outage != "flush":
            assert durable == [False] * 3
            own = await store.load("r1")
            assert own is not None
            assert own.output_token_ids == (1, 2, 3, 4)
        await asyncio.to_thread(end, server)
        assert await eventually_durable(store)
        await synced(store)
        assert await from_server(server, "r1") == record("r1", output_token_ids=(1, 2, 3, 4, 5))
        assert await from_server(server, "r2") == record("r2", output_token_ids=(1, 2, 9), finish_reason=STOP)


async def test_an_idle_request_lost_by_a_flush_is_written_again(server: Server) -> None:
    """A request that waits for its verifier commits nothing; the renewal of its lease finds the record gone."""
    async with opened(server, lease_s=0.2) as store:
        await begin(store, [1, 2])
        client = server.client()
        client.flushall()
        await eventually(lambda: bool(client.exists("moot:{r1}")))
        assert await from_server(server) == record(output_token_ids=(1, 2))


async def test_new_requests_without_the_server(server: Server) -> None:
    """`degrade` serves them and says that they are not durable; their record follows when the server is back."""
    server.kill()
    async with opened(server) as store:
        assert not store.up
        assert not await store.create(record())
        assert not await store.commit("r1", 1, 0, [1])
        with pytest.raises(StoreUnavailable):
            await store.load("unknown")
        with pytest.raises(StoreUnavailable):
            await store.claim("r1")
        await asyncio.to_thread(server.start)
        await synced(store)
        assert await store.create(record("r2"))
        assert await from_server(server) == record(output_token_ids=(1,))


async def test_required_mode_refuses_new_requests_without_the_server(server: Server) -> None:
    """`required`: no record, no request; and back again by itself."""
    async with opened(server, mode="required") as store:
        server.kill()
        for _ in range(2):
            with pytest.raises(NoCapacity):
                await store.create(record())
        assert store.num_unsynced == 0, "a refused request leaves nothing behind"
        await asyncio.to_thread(server.start)
        await eventually(lambda: store.up)
        assert await store.create(record())


@pytest.mark.parametrize("mode", ["degrade", "required"])
async def test_from_85_percent_of_memory_new_requests_get_no_record(server: Server, mode: str) -> None:
    """Room is kept for the requests that run; they are still committed."""
    client = server.client()
    async with opened(server, mode=mode) as store:
        assert await store.create(record())
        server.limit(str(int(client.info("memory")["used_memory"] / 0.9)))
        await eventually(lambda: store._nearly_full)
        if mode == "required":
            with pytest.raises(NoCapacity):
                await store.create(record("r2"))
        else:
            assert not await store.create(record("r2"))
            assert not await store.commit("r2", 1, 0, [7])
        assert await store.commit("r1", 1, 0, [1])
        assert not client.exists("moot:{r2}")
        server.limit()
        await synced(store)
        if mode == "degrade":
            assert await from_server(server, "r2") == record("r2", output_token_ids=(7,))


async def test_a_router_that_was_away_is_fenced(server: Server) -> None:
    """Its lease over and the request claimed, its commits are refused, also those it could not send in time."""
    async with opened(server, lease_s=0.05, upkeep_interval_s=60) as old, opened(server) as new:
        await begin(old, [1, 2])
        assert await claimed(new) == record(epoch=2, output_token_ids=(1, 2))
        for _ in range(2):
            with pytest.raises(CommitFenced):
                await old.commit("r1", 1, 2, [9])
        assert await new.commit("r1", 2, 2, [3], STOP)
        assert await old.load("r1") == record(epoch=2, output_token_ids=(1, 2, 3), finish_reason=STOP)


async def test_the_rules_of_commit_hold_without_the_server(server: Server) -> None:
    """Idempotence, conflict and end do not depend on who keeps the record."""
    server.kill()
    async with opened(server) as store:
        await store.create(record())
        for _ in range(2):
            assert not await store.commit("r1", 1, 0, [1, 2])
        with pytest.raises(CommitConflict):
            await store.commit("r1", 1, 1, [2, 3])
        with pytest.raises(CommitFenced):
            await store.commit("r1", 2, 2, [3])
        for _ in range(2):
            assert not await store.commit("r1", 1, 2, [3], STOP)
        with pytest.raises(CommitTerminal):
            await store.commit("r1", 1, 3, [4])
        await asyncio.to_thread(server.start)
        await synced(store)
        assert await from_server(server) == record(output_token_ids=(1, 2, 3), finish_reason=STOP)
        assert await store.commit("r1", 1, 2, [3], STOP), "sent again after the end: success"


async def test_a_cancelled_commit_is_not_lost(server: Server) -> None:
    """Its tokens are in the mirror when its task dies; the next commit or the upkeep brings them."""
    async with opened(server) as store:
        await store.create(record())
        for step in range(50):
            task = asyncio.create_task(store.commit("r1", 1, step, [step]))
            for _ in range(step % 4 + 1):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await synced(store)
        assert await from_server(server) == record(output_token_ids=tuple(range(50)))


async def test_ended_requests_leave_nothing_in_memory(server: Server) -> None:
    """Per-request state has an end: with the last commit, or with the time to live when nobody commits it."""
    async with opened(server, ttl_s=0.3) as store:
        for index in range(20):
            await begin(store, [1], STOP, request_id=f"e{index}")
        assert not store._mirrors
        await store.create(record("abandoned"))
        await eventually(lambda: not store._mirrors)


@pytest.mark.parametrize("outage", [False, True])
async def test_an_open_request_that_was_let_go_can_be_claimed(server: Server, outage: bool) -> None:
    """Its lease is not prolonged any more, and nothing of it stays in memory once the server has all of it."""
    options = FROZEN if outage else {}
    async with opened(server, lease_s=0.3, mode="degrade", **options) as store, opened(server) as other:
        assert await store.create(record())
        if outage:
            server.freeze()
        assert await store.commit("r1", 1, 0, [1, 2]) is not outage
        store.release("r1")
        if outage:
            assert store.num_unsynced == 1
            server.thaw()
        await eventually(lambda: not store._mirrors)
        assert await claimed(other) == record(epoch=2, output_token_ids=(1, 2))


async def test_a_lost_request_that_was_let_go_leaves_nothing(server: Server) -> None:
    """Another router has it: this one forgets it at once."""
    async with opened(server) as store, opened(server) as other:
        assert await store.create(record())
        assert await other.cancel("r1")
        with pytest.raises(CommitTerminal):
            await store.commit("r1", 1, 0, [1])
        store.release("r1")
        assert not store._mirrors


async def test_a_bounded_number_of_requests_is_held(server: Server) -> None:
    """Past the bound a request is served without a record, or refused where a record is required."""
    async with opened(server, max_open_records=1) as store:
        assert await store.create(record("r1"))
        assert not await store.create(record("r2"))
        assert not await store.commit("r2", 1, 0, [1])
    async with opened(server, max_open_records=1, mode="required") as store:
        await store.create(record("r3"))
        with pytest.raises(NoCapacity):
            await store.create(record("r4"))


async def test_close_brings_the_tail(server: Server) -> None:
    """A router that stops leaves whole records behind."""
    async with opened(server, upkeep_interval_s=60) as store:
        await store.create(record())
        task = asyncio.create_task(store.commit("r1", 1, 0, [1]))
        await asyncio.sleep(0)
        task.cancel()
    assert await from_server(server) == record(output_token_ids=(1,))


async def test_records_survive_a_restart_of_a_persistent_server(tmp_path: Path) -> None:
    """With the append-only file a request is rebuilt from the server alone, prompt and parameters included."""
    server = Server(tmp_path, persistent=True)
    try:
        async with opened(server) as store:
            await begin(store, [1, 2])
        server.client().execute_command("WAITAOF", 1, 0, 5000)
        server.kill()
        server.start()
        assert await from_server(server) == record(output_token_ids=(1, 2))
    finally:
        server.kill()
