"""The server-side functions, one status at a time, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis import Redis

from moot.core.errors import CommitConflict, CommitFenced, CommitTerminal, LeaseHeld, RecordNotFound
from moot.core.types import FinishReason
from services.router.store.record_server import RecordBehind, RedisStore, ServerFull
from tests.services.router.store.store_server import Server, begin, claimed, linked, record

STOP = FinishReason.STOP


@asynccontextmanager
async def on(server: Server, owner: str = "a", **changes: Any) -> AsyncIterator[RedisStore]:
    async with linked(server, owner, **changes) as (_, store):
        yield store


@pytest.fixture
def client(shared_server: Server) -> Redis:
    client = shared_server.client()
    client.flushall()
    return client


@pytest.fixture
def store(shared_server: Server, client: Redis) -> Any:
    return on(shared_server)


class TestCommit:
    async def test_ok_appends(self, store: RedisStore) -> None:
        """What was committed is what is loaded, with the reason of the end."""
        await begin(store, [1, 2])
        await store.commit("r1", 1, 2, [3], STOP)
        assert await store.load("r1") == record(output_token_ids=(1, 2, 3), finish_reason=STOP)

    async def test_the_same_call_twice_counts_once(self, store: RedisStore) -> None:
        """A retry may follow a call that was applied: it succeeds and changes nothing, also after the end."""
        for _ in range(2):
            await store.create(record())
        for _ in range(2):
            await store.commit("r1", 1, 0, [1, 2])
        for _ in range(2):
            await store.commit("r1", 1, 2, [], STOP)
        assert await store.load("r1") == record(output_token_ids=(1, 2), finish_reason=STOP)

    async def test_another_span_at_the_same_place_conflicts(self, store: RedisStore) -> None:
        """Two texts can not both be committed."""
        await begin(store, [1, 2])
        with pytest.raises(CommitConflict):
            await store.commit("r1", 1, 0, [1, 9])
        with pytest.raises(CommitConflict):
            await store.commit("r1", 1, 1, [2, 3])
        assert await store.load("r1") == record(output_token_ids=(1, 2))

    async def test_a_gap_or_a_missing_record_asks_for_repair(self, store: RedisStore) -> None:
        """The server lost something: the owner must not go on as if nothing were missing."""
        with pytest.raises(RecordBehind):
            await store.commit("r1", 1, 0, [1])
        await store.create(record())
        with pytest.raises(RecordBehind):
            await store.commit("r1", 1, 4, [1])

    async def test_after_the_end_nothing_is_added(self, store: RedisStore) -> None:
        """A request ends once."""
        await begin(store, [1], STOP)
        with pytest.raises(CommitTerminal):
            await store.commit("r1", 1, 1, [2])

    async def test_cancel_from_outside_ends_it(self, store: RedisStore) -> None:
        """The owner of a cancelled request learns it with its next commit."""
        assert not await store.cancel("r1")
        await store.create(record())
        assert await store.cancel("r1")
        assert not await store.cancel("r1")
        with pytest.raises(CommitTerminal):
            await store.commit("r1", 1, 0, [1])
        assert await store.load("r1") == record(finish_reason=FinishReason.ABORT)


@pytest.mark.usefixtures("client")
class TestClaim:
    async def test_rebuilds_a_half_done_request_and_fences_its_owner(self, shared_server: Server) -> None:
        """A second router takes over from the record alone; whatever the first still does is refused."""
        async with (
            on(shared_server, "a", lease_s=0.01) as first,
            on(shared_server, "b", lease_s=60) as second,
        ):
            await begin(first, [1, 2])
            assert await claimed(second) == record(epoch=2, output_token_ids=(1, 2))
            for late in (
                first.commit("r1", 1, 2, [3]),
                first.commit("r1", 1, 0, [1, 2]),
                first.renew("r1", 1),
                first.repair(record(output_token_ids=(1, 2, 3))),
            ):
                with pytest.raises(CommitFenced):
                    await late
            await second.commit("r1", 2, 2, [4])
            assert (await second.load("r1")) == record(epoch=2, output_token_ids=(1, 2, 4))

    async def test_a_living_owner_keeps_it(self, shared_server: Server) -> None:
        """Before the lease is over nobody else may claim, and is told how long to wait."""
        async with on(shared_server, lease_s=60) as store:
            await store.create(record())
            with pytest.raises(LeaseHeld) as caught:
                await store.claim("r1")
            assert 50 < caught.value.retry_after_s <= 60

    async def test_renewal_and_commit_prolong_the_lease(self, shared_server: Server) -> None:
        """A request that only waits is not taken away."""
        async with (
            on(shared_server, "a", lease_s=0.01) as short,
            on(shared_server, "a", lease_s=60) as long,
        ):
            for request_id, prolong in (("r1", long.renew("r1", 1)), ("r2", long.commit("r2", 1, 0, [1]))):
                await short.create(record(request_id))
                await prolong
                with pytest.raises(LeaseHeld):
                    await short.claim(request_id)

    async def test_finished_and_unknown_requests_cannot_be_claimed(self, shared_server: Server) -> None:
        """There is nothing to go on with."""
        async with on(shared_server, lease_s=0.01) as store:
            with pytest.raises(RecordNotFound):
                await store.claim("r1")
            assert await store.load("r1") is None
            await begin(store, [1], STOP)
            with pytest.raises(CommitTerminal):
                await store.claim("r1")


class TestRepair:
    @pytest.mark.parametrize("known", [0, 1, 3], ids=["nothing", "a part", "everything"])
    async def test_brings_the_missing_tail(self, store: RedisStore, known: int) -> None:
        """Whatever the server still has, afterwards it has what the owner has."""
        whole = record(output_token_ids=(1, 2, 3), finish_reason=STOP)
        if known:
            await begin(store, [1, 2, 3][:known])
        for _ in range(2):
            await store.repair(whole)
            assert await store.load("r1") == whole

    async def test_does_not_overwrite_other_tokens(self, store: RedisStore) -> None:
        """A record of the same owner with another text is a fault to report, not to hide."""
        await begin(store, [1, 2])
        for other in ((1, 9, 3), (1,)):
            with pytest.raises(CommitConflict):
                await store.repair(record(output_token_ids=other))
        assert await store.load("r1") == record(output_token_ids=(1, 2))

    async def test_a_server_that_lost_a_claim_takes_the_newer_owner(self, store: RedisStore) -> None:
        """After a failover the record may be from before the claim: the higher epoch wins."""
        await begin(store, [1, 2])
        newer = record(epoch=2, output_token_ids=(1, 2, 3))
        with pytest.raises(RecordBehind):
            await store.commit("r1", 2, 3, [4])
        await store.repair(newer)
        assert await store.load("r1") == newer


async def test_two_requests_of_one_id_cannot_be_created(shared_server: Server, client: Redis) -> None:
    """A second owner of the same id would overwrite the first one's text."""
    async with on(shared_server, "a") as first, on(shared_server, "b") as second:
        await first.create(record())
        with pytest.raises(CommitConflict):
            await second.create(record())


async def test_every_key_has_a_time_to_live_and_no_content_in_its_name(shared_server: Server, client: Redis) -> None:
    """Nothing is left for ever, and key names, which servers log, carry no prompt and no token."""
    canary = 987654321
    async with on(shared_server, prefix="rel") as store:
        await store.create(record("r1", prompt=(canary,)))
        await store.commit("r1", 1, 0, [canary])
        await store.create(record("r2"))
        await store.cancel("r2")
        await store.repair(record("r3", output_token_ids=(canary,), finish_reason=STOP))
    keys: list[bytes] = client.keys("*")
    assert len(keys) == 8  # r2 has no output, so no stream
    for key in keys:
        assert key.startswith(b"rel:{r")
        assert str(canary).encode() not in key
        assert 0 < client.pttl(key) <= 3_600_000


async def test_finished_records_live_as_long_as_they_can_be_replayed(shared_server: Server, client: Redis) -> None:
    """A finished request frees its memory sooner than a running one."""
    async with on(shared_server, finished_ttl_s=60) as store:
        await begin(store, [1], STOP)
    assert all(0 < client.pttl(key) <= 60_000 for key in client.keys("*"))


async def test_functions_survive_a_flush_and_are_loaded_when_missing(store: RedisStore, client: Redis) -> None:
    """A server restarted without its functions gets them with the first call that needs them."""
    await store.create(record("r1"))
    client.flushall()
    assert len(client.function_list()) == 1
    client.function_flush()
    await asyncio.gather(*(store.create(record(f"r{index}")) for index in range(8)))
    client.function_flush()
    await store.commit("r1", 1, 0, [1])
    assert await store.load("r1") == record("r1", output_token_ids=(1,))


async def test_a_full_server_applies_nothing_of_a_call(shared_server: Server, store: RedisStore, client: Redis) -> None:
    """A commit is refused whole: a hash that is ahead of its stream could never be read again."""
    await begin(store, [1])
    shared_server.limit("1")
    try:
        for call in (
            store.commit("r1", 1, 1, [2]),
            store.repair(record(output_token_ids=(1, 2))),
            store.create(record("r2")),
            store.cancel("r1"),
            store.renew("r1", 1),
        ):
            with pytest.raises(ServerFull):
                await call
        assert await store.load("r1") == record(output_token_ids=(1,)), "reading needs no memory"
    finally:
        shared_server.limit()
    await store.commit("r1", 1, 1, [2])
    assert await store.load("r1") == record(output_token_ids=(1, 2))
    assert not client.exists("moot:{r2}", "moot:{r2}:p", "moot:{r2}:t")


async def test_a_server_that_runs_full_inside_a_call_never_leaves_half(
    shared_server: Server, store: RedisStore, client: Redis
) -> None:
    """Filled commit by commit, at every moment the record is whole: what was answered OK, or one more."""
    shared_server.limit(str(client.info("memory")["used_memory"] + 400_000))
    await store.create(record())
    length = 0

    async def fill() -> None:
        nonlocal length
        for length in range(0, 500_000, 500):
            await store.commit("r1", 1, length, range(500))

    try:
        with pytest.raises(ServerFull):
            await fill()
        loaded = await store.load("r1")
    finally:
        shared_server.limit()
    assert loaded is not None
    assert len(loaded.output_token_ids) == length > 0
