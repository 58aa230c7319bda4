"""The pipeline to the server: replies go to their own callers, waits are bounded, a lost server costs one timeout."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from moot.core.errors import StoreUnavailable
from services.router.store.record_server import RedisLink, RedisStore
from tests.services.router.store.store_server import FROZEN, Server, linked, record


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_calls_never_hand_their_reply_to_another_request(shared_server: Server, seed: int) -> None:
    """C28: 200 requests at once, half of them cancelled at random moments; the others read their own record only."""
    draw = random.Random(seed)

    async def one(store: RedisStore, index: int) -> int:
        request_id = f"c{seed}-{index}"
        await store.create(record(request_id, prompt=(index,)))
        for step in range(5):
            await store.commit(request_id, 1, step, [index * 10 + step])
            loaded = await store.load(request_id)
            assert loaded is not None
            assert loaded.prompt_token_ids == (index,)
            assert loaded.output_token_ids == tuple(index * 10 + done for done in range(step + 1))
        return index

    async with linked(shared_server, max_batch_calls=16) as (_, store):
        tasks = [asyncio.create_task(one(store, index)) for index in range(200)]
        doomed = draw.sample(tasks, 100)
        for task in doomed:
            task.cancel() if draw.random() < 0.1 else None
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for index, (task, result) in enumerate(zip(tasks, results, strict=True)):
        assert result == index or (task in doomed and isinstance(result, asyncio.CancelledError)), result
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) > 50


async def test_commits_of_one_tick_share_a_pipeline(shared_server: Server) -> None:
    """A frame of verify answers costs one round trip, not one per request."""
    client = shared_server.client()
    async with linked(shared_server) as (_, store):
        await asyncio.gather(*(store.create(record(f"p{index}")) for index in range(64)))
        before = client.info("stats")["total_reads_processed"]
        await asyncio.gather(*(store.commit(f"p{index}", 1, 0, [index]) for index in range(64)))
        assert client.info("stats")["total_reads_processed"] - before < 8


async def test_a_batch_has_a_bound(shared_server: Server) -> None:
    """Large prompts do not pile up into one pipeline that outlives its timeout."""
    async with linked(shared_server, max_batch_bytes=10_000) as (_, store):
        prompt = tuple(range(2_000))
        await asyncio.gather(*(store.create(record(f"b{index}", prompt=prompt)) for index in range(20)))
        loaded = await asyncio.gather(*(store.load(f"b{index}") for index in range(20)))
        assert [one.request_id for one in loaded if one] == [f"b{index}" for index in range(20)]


async def unavailable(store: RedisStore, count: int) -> list[str]:
    """Why so many calls at once failed, each of them."""
    results = await asyncio.gather(*(store.load(f"q{index}") for index in range(count)), return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
    return list(map(str, results))


async def test_a_full_queue_refuses_at_once(server: Server) -> None:
    """A server that stands still holds up a bounded number of calls."""
    server.freeze()
    async with linked(server, max_queued_calls=4, **FROZEN) as (_, store):
        assert sum("too many" in reason for reason in await unavailable(store, 20)) >= 15


@pytest.mark.parametrize("fault", [Server.freeze, Server.kill])
async def test_a_lost_server_costs_one_bounded_wait(server: Server, fault: Callable[[Server], None]) -> None:
    """The first calls wait for two attempts at most, later ones not at all. The bound is wide, for a busy machine."""
    changes: list[bool] = []
    async with linked(server, on_change=changes.append, **FROZEN) as (link, store):
        await link.probe()
        fault(server)
        started = time.monotonic()
        await unavailable(store, 50)
        # redis-py alone would try seventy times as long as one attempt.
        assert time.monotonic() - started < 20 * FROZEN["timeout_s"]
        assert changes == [True, False]
        with pytest.raises(StoreUnavailable):
            # Not one step of the loop: there is no wait at all.
            store.load("l1").send(None)


async def test_replies_after_a_timeout_are_never_read(server: Server) -> None:
    """A late reply belongs to a call that is over; the next call must not get it."""
    async with linked(server, **FROZEN) as (link, store):
        for index in range(3):
            await link.probe()
            await store.create(record(f"t{index}", prompt=(index,)))
            server.freeze()
            with pytest.raises(StoreUnavailable):
                await store.load(f"t{index}")
            server.thaw()
            await probe_until_up(link)
            for other in range(index + 1):
                loaded = await store.load(f"t{other}")
                assert loaded is not None
                assert loaded.prompt_token_ids == (other,)


async def probe_until_up(link: RedisLink) -> None:
    while True:
        try:
            await link.probe()
            return
        except StoreUnavailable:
            continue


async def test_an_idle_connection_closed_by_the_server_is_replaced(shared_server: Server) -> None:
    """One retry on a new connection: a server that drops idle clients is not an outage."""
    changes: list[bool] = []
    async with linked(shared_server, on_change=changes.append) as (link, store):
        await link.probe()
        for index in range(3):
            shared_server.client().client_kill_filter(_type="normal", skipme=True)
            await store.create(record(f"i{index}"))
        assert changes == [True]
        assert await store.load("i2") == record("i2")


async def test_after_close_calls_fail_at_once(shared_server: Server) -> None:
    """Nobody waits for a link that is gone."""
    async with linked(shared_server) as (_, store):
        waiting = asyncio.create_task(store.load("x"))
        await asyncio.sleep(0)
    for call in (waiting, store.load("x")):
        with pytest.raises(StoreUnavailable):
            await call
