"""C29: the server of records is replaced by its replica, as its sentinels say: no request fails, no token is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from moot.core.types import FinishReason
from moot.testing.tiny_model import make_tiny_model
from services.router.generation.request_types import RequestRecord
from services.router.store import StoreConfig
from services.router.store.record_server import RedisLink, RedisStore
from tests.integration.asking import Ask, Reply, assert_same
from tests.integration.faulty import STEP_DELAY, Rig, body
from tests.integration.processes import Process, equal_to, wait_metric
from tests.integration.sentinel_group import Group
from tests.integration.whole_system import running
from tests.waiting import GIVE_UP_S, until


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, group: Group) -> Iterator[Rig]:
    """Router 0 in mode `degrade`, router 1 in mode `required`."""
    folder = tmp_path_factory.mktemp("failover")
    model = make_tiny_model(folder / "tiny")
    with running(folder / "logs", model, router_flags=group.flags, faults={"verifier-0": STEP_DELAY}) as system:
        system.add_router((*group.flags, "--store-mode", "required"))
        for router in system.routers:
            wait_metric(router, "moot_state_store_up", equal_to(1))
        yield Rig(system)


def record_of(group: Group, reply: Reply) -> RequestRecord | None:
    """As the new master has it, once it is whole."""

    async def load() -> RequestRecord | None:
        config = StoreConfig(url=f"redis://127.0.0.1:{group.servers[1].port}", timeout_s=GIVE_UP_S)
        link = RedisLink(config)
        try:
            return await RedisStore(link, config).load(f"{reply.request_id}-0")
        finally:
            await link.close()

    record = asyncio.run(load())
    return record if record is not None and record.finish_reason is not None else None


def is_durable(router: Process, reply: Reply) -> bool:
    return reply.status == 200 and "x-moot-durable" not in reply.headers


def test_a_failover_in_mid_stream_fails_no_request(rig: Rig, group: Group) -> None:
    """C29: the master freezes, as one that is cut off, while requests run: they finish right, new ones are served (mode
    `required`: refused with Retry-After until there is a master); then commits go to the new master, which has every
    token of every request, and the old one, when it wakes, gets nothing."""
    degrade, required = rig.system.routers
    bodies = [body(index, max_tokens=150) for index in range(3)]
    expected = rig.all_expected(bodies)
    later, later_right = body(4, max_tokens=30), rig.expected(body(4, max_tokens=30))
    streams = [Ask(router.port, asked) for router in (degrade, required) for asked in bodies[:2]]
    wholes = [Ask(router.port, bodies[2], stream=False) for router in (degrade, required)]
    for ask in streams:
        ask.wait_tokens(4)
    old = group.servers[0]
    old.send(signal.SIGSTOP)
    for router in (degrade, required):
        wait_metric(router, "moot_state_store_up", equal_to(0))
    meanwhile = Ask(degrade.port, later).result()
    assert_same(meanwhile, later_right)
    refused = Ask(required.port, later, stream=False).result()
    assert is_durable(required, refused) or (refused.status == 503 and int(refused.headers["retry-after"]) >= 1)
    replies = [ask.result() for ask in (*streams, *wholes)]
    for reply, right in zip(replies, (*expected[:2] * 2, *expected[2:] * 2), strict=True):
        assert_same(reply, right)

    group.wait_failover()
    for router in (degrade, required):
        wait_metric(router, "moot_state_store_up", equal_to(1))
    for reply in (*replies, meanwhile):
        record = until(lambda reply=reply: record_of(group, reply), f"the record of {reply.request_id}")
        assert list(record.output_token_ids) == reply.token_ids
        assert record.finish_reason is FinishReason.LENGTH
    old.send(signal.SIGCONT)
    until(lambda: old.client().info("replication")["role"] == "slave", "the old master follows the new one")
    for router in (degrade, required):
        durable = Ask(router.port, later).result()
        assert_same(durable, later_right)
        assert is_durable(router, durable)
        assert until(lambda reply=durable: record_of(group, reply), "its record")
    rig.system.assert_idle()
