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
from services.router.store.record_server import RecordBehind, RedisLink, RedisStore, ServerFull
from tests.services.router.store.store_server import Server, config, record, run

STOP = FinishReason.STOP


@asynccontextmanager
async def opened(server: Server, owner: str = "a", **changes: Any) -> AsyncIterator[RedisStore]:
    link = RedisLink(made := config(server, **changes))
    try:
        yield RedisStore(link, made, owner)
    finally:
        await link.close()


@pytest.fixture
def client(shared_server: Server) -> Redis:
    client = shared_server.client()
    client.flushall()
    return client


@pytest.mark.usefixtures("client")
class TestCommit:
    def test_ok_appends(self, shared_server: Server) -> None:
        """What was committed is what is loaded, with the reason of the end."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                await store.create(record())
                await store.commit("r1", 1, 0, [1, 2])
                await store.commit("r1", 1, 2, [3], STOP)
                assert await store.load("r1") == record(output_token_ids=(1, 2, 3), finish_reason=STOP)

        run(scenario())

    def test_the_same_call_twice_counts_once(self, shared_server: Server) -> None:
        """A retry may follow a call that was applied: it succeeds and changes nothing, also after the end."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                for _ in range(2):
                    await store.create(record())
                for _ in range(2):
                    await store.commit("r1", 1, 0, [1, 2])
                for _ in range(2):
                    await store.commit("r1", 1, 2, [], STOP)
                assert await store.load("r1") == record(output_token_ids=(1, 2), finish_reason=STOP)

        run(scenario())

    def test_another_span_at_the_same_place_conflicts(self, shared_server: Server) -> None:
        """Two texts can not both be committed."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                await store.create(record())
                await store.commit("r1", 1, 0, [1, 2])
                with pytest.raises(CommitConflict):
                    await store.commit("r1", 1, 0, [1, 9])
                with pytest.raises(CommitConflict):
                    await store.commit("r1", 1, 1, [2, 3])
                assert await store.load("r1") == record(output_token_ids=(1, 2))

        run(scenario())

    def test_a_gap_or_a_missing_record_asks_for_repair(self, shared_server: Server) -> None:
        """The server lost something: the owner must not go on as if nothing were missing."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                with pytest.raises(RecordBehind):
                    await store.commit("r1", 1, 0, [1])
                await store.create(record())
                with pytest.raises(RecordBehind):
                    await store.commit("r1", 1, 4, [1])

        run(scenario())

    def test_after_the_end_nothing_is_added(self, shared_server: Server) -> None:
        """A request ends once."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                await store.create(record())
                await store.commit("r1", 1, 0, [1], STOP)
                with pytest.raises(CommitTerminal):
                    await store.commit("r1", 1, 1, [2])

        run(scenario())

    def test_cancel_from_outside_ends_it(self, shared_server: Server) -> None:
        """The owner of a cancelled request learns it with its next commit."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                assert not await store.cancel("r1")
                await store.create(record())
                assert await store.cancel("r1")
                assert not await store.cancel("r1")
                with pytest.raises(CommitTerminal):
                    await store.commit("r1", 1, 0, [1])
                assert await store.load("r1") == record(finish_reason=FinishReason.ABORT)

        run(scenario())


@pytest.mark.usefixtures("client")
class TestClaim:
    def test_rebuilds_a_half_done_request_and_fences_its_owner(self, shared_server: Server) -> None:
        """A second router takes over from the record alone; whatever the first still does is refused."""

        async def scenario() -> None:
            async with (
                opened(shared_server, "a", lease_s=0.01) as first,
                opened(shared_server, "b", lease_s=60) as second,
            ):
                await first.create(record())
                await first.commit("r1", 1, 0, [1, 2])
                claimed = await claim_when_over(second)
                assert claimed == record(epoch=2, output_token_ids=(1, 2))
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

        run(scenario())

    def test_a_living_owner_keeps_it(self, shared_server: Server) -> None:
        """Before the lease is over nobody else may claim, and is told how long to wait."""

        async def scenario() -> None:
            async with opened(shared_server, lease_s=60) as store:
                await store.create(record())
                with pytest.raises(LeaseHeld) as caught:
                    await store.claim("r1")
                assert 50 < caught.value.retry_after_s <= 60

        run(scenario())

    def test_renewal_and_commit_prolong_the_lease(self, shared_server: Server) -> None:
        """A request that only waits is not taken away."""

        async def scenario() -> None:
            async with (
                opened(shared_server, "a", lease_s=0.01) as short,
                opened(shared_server, "a", lease_s=60) as long,
            ):
                for request_id, prolong in (("r1", long.renew("r1", 1)), ("r2", long.commit("r2", 1, 0, [1]))):
                    await short.create(record(request_id))
                    await prolong
                    with pytest.raises(LeaseHeld):
                        await short.claim(request_id)

        run(scenario())

    def test_finished_and_unknown_requests_cannot_be_claimed(self, shared_server: Server) -> None:
        """There is nothing to go on with."""

        async def scenario() -> None:
            async with opened(shared_server, lease_s=0.01) as store:
                with pytest.raises(RecordNotFound):
                    await store.claim("r1")
                assert await store.load("r1") is None
                await store.create(record())
                await store.commit("r1", 1, 0, [1], STOP)
                with pytest.raises(CommitTerminal):
                    await store.claim("r1")

        run(scenario())


async def claim_when_over(store: RedisStore) -> Any:
    while True:
        try:
            return await store.claim("r1")
        except LeaseHeld as held:
            await asyncio.sleep(held.retry_after_s)


@pytest.mark.usefixtures("client")
class TestRepair:
    @pytest.mark.parametrize("known", [0, 1, 3], ids=["nothing", "a part", "everything"])
    def test_brings_the_missing_tail(self, shared_server: Server, known: int) -> None:
        """Whatever the server still has, afterwards it has what the owner has."""
        whole = record(output_token_ids=(1, 2, 3), finish_reason=STOP)

        async def scenario() -> None:
            async with opened(shared_server) as store:
                if known:
                    await store.create(record())
                    await store.commit("r1", 1, 0, [1, 2, 3][:known])
                for _ in range(2):
                    await store.repair(whole)
                    assert await store.load("r1") == whole

        run(scenario())

    def test_does_not_overwrite_other_tokens(self, shared_server: Server) -> None:
        """A record of the same owner with another text is a fault to report, not to hide."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                await store.create(record())
                await store.commit("r1", 1, 0, [1, 2])
                for other in ((1, 9, 3), (1,)):
                    with pytest.raises(CommitConflict):
                        await store.repair(record(output_token_ids=other))
                assert await store.load("r1") == record(output_token_ids=(1, 2))

        run(scenario())

    def test_a_server_that_lost_a_claim_takes_the_newer_owner(self, shared_server: Server) -> None:
        """After a failover the record may be from before the claim: the higher epoch wins."""

        async def scenario() -> None:
            async with opened(shared_server) as store:
                await store.create(record())
                await store.commit("r1", 1, 0, [1, 2])
                newer = record(epoch=2, output_token_ids=(1, 2, 3))
                with pytest.raises(RecordBehind):
                    await store.commit("r1", 2, 3, [4])
                await store.repair(newer)
                assert await store.load("r1") == newer

        run(scenario())


def test_two_requests_of_one_id_cannot_be_created(shared_server: Server, client: Redis) -> None:
    """A second owner of the same id would overwrite the first one's text."""

    async def scenario() -> None:
        async with opened(shared_server, "a") as first, opened(shared_server, "b") as second:
            await first.create(record())
            with pytest.raises(CommitConflict):
                await second.create(record())

    run(scenario())


def test_every_key_has_a_time_to_live_and_no_content_in_its_name(shared_server: Server, client: Redis) -> None:
    """Nothing is left for ever, and key names, which servers log, carry no prompt and no token."""
    canary = 987654321

    async def scenario() -> None:
        async with opened(shared_server, prefix="rel") as store:
            await store.create(record("r1", prompt=(canary,)))
            await store.commit("r1", 1, 0, [canary])
            await store.create(record("r2"))
            await store.cancel("r2")
            await store.repair(record("r3", output_token_ids=(canary,), finish_reason=STOP))

    run(scenario())
    keys: list[bytes] = client.keys("*")
    assert len(keys) == 8  # r2 has no output, so no stream
    for key in keys:
        assert key.startswith(b"rel:{r")
        assert str(canary).encode() not in key
        assert 0 < client.pttl(key) <= 3_600_000


def test_finished_records_live_as_long_as_they_can_be_replayed(shared_server: Server, client: Redis) -> None:
    """A finished request frees its memory sooner than a running one."""

    async def scenario() -> None:
        async with opened(shared_server, finished_ttl_s=60) as store:
            await store.create(record())
            await store.commit("r1", 1, 0, [1], STOP)

    run(scenario())
    assert all(0 < client.pttl(key) <= 60_000 for key in client.keys("*"))


def test_functions_survive_a_flush_and_are_loaded_when_missing(shared_server: Server, client: Redis) -> None:
    """A server restarted without its functions gets them with the first call that needs them."""

    async def scenario() -> None:
        async with opened(shared_server) as store:
            await store.create(record("r1"))
            client.flushall()
            assert len(client.function_list()) == 1
            client.function_flush()
            await asyncio.gather(*(store.create(record(f"r{index}")) for index in range(8)))
            client.function_flush()
            await store.commit("r1", 1, 0, [1])
            assert await store.load("r1") == record("r1", output_token_ids=(1,))

    run(scenario())


def test_a_full_server_applies_nothing_of_a_call(shared_server: Server, client: Redis) -> None:
    """A commit is refused whole: a hash that is ahead of its stream could never be read again."""

    async def scenario() -> None:
        async with opened(shared_server) as store:
            await store.create(record())
            await store.commit("r1", 1, 0, [1])
            client.config_set("maxmemory", 1)
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
                client.config_set("maxmemory", "64mb")
            await store.commit("r1", 1, 1, [2])
            assert await store.load("r1") == record(output_token_ids=(1, 2))
            assert not client.exists("moot:{r2}", "moot:{r2}:p", "moot:{r2}:t")

    run(scenario())


def test_a_server_that_runs_full_inside_a_call_never_leaves_half(shared_server: Server, client: Redis) -> None:
    """Filled commit by commit, at every moment the record is whole: what was answered OK, or one more."""
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + 400_000)

    async def scenario() -> None:
        async with opened(shared_server) as store:
            await store.create(record())
            length, span = 0, list(range(500))
            try:
                for length in range(0, 500_000, len(span)):
                    await store.commit("r1", 1, length, span)
            except ServerFull:
                pass
            else:
                pytest.fail("the server never ran full")
            loaded = await store.load("r1")
            assert loaded is not None
            assert len(loaded.output_token_ids) == length > 0

    try:
        run(scenario())
    finally:
        client.config_set("maxmemory", "64mb")
