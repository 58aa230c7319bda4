"""The store without a server follows the server's rules."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import NoCapacity, StoreError
from moot.core.types import FinishReason
from services.router.store import DurableStore, MemoryStore, StoreConfig, open_store
from tests.services.router.store.store_server import Server, opened, record

STOP = FinishReason.STOP
_numbers = itertools.count()
_commits = st.tuples(
    st.just("commit"),
    st.integers(0, 1),
    st.integers(0, 4),
    st.lists(st.integers(0, 1), min_size=1, max_size=2),
    st.sampled_from([None, None, None, STOP]),
)
_steps = st.lists(_commits | st.just(("load",)) | st.just(("claim",)), max_size=12)


async def apply(store: DurableStore | MemoryStore, request_id: str, step: tuple[Any, ...]) -> Any:
    """What came of one call, durability aside."""
    name, *arguments = step
    try:
        result = await getattr(store, name)(request_id, *arguments)
    except StoreError as error:
        return type(error)
    return None if name == "commit" else result


@settings(max_examples=60)
@given(steps=_steps)
def test_same_calls_same_answers(shared_server: Server, steps: list[tuple[Any, ...]]) -> None:
    """One protocol, one behaviour: the rounds need not know which store they use."""

    async def scenario() -> None:
        request_id, memory = f"m-{next(_numbers)}", MemoryStore()
        async with opened(shared_server, upkeep_interval_s=60) as durable:
            await durable.create(record(request_id))
            await memory.create(record(request_id))
            for step in steps:
                assert await apply(durable, request_id, step) == await apply(memory, request_id, step), step

    asyncio.run(scenario())


async def test_nothing_is_called_durable() -> None:
    """What dies with the process must not be reported as kept."""
    store = MemoryStore()
    assert not await store.create(record())
    assert not await store.commit("r1", 1, 0, [1])
    assert isinstance(await open_store(StoreConfig()), MemoryStore)


async def test_claim_after_the_lease() -> None:
    """A resumed request gets a new epoch here too."""
    store = MemoryStore(lease_s=0.0)
    await store.create(record())
    assert await store.claim("r1") == record(epoch=2)


async def test_room_is_bounded() -> None:
    """Finished records make room, and those that nobody works on; running ones do not."""
    store = MemoryStore(max_records=2)
    await store.create(record("a"))
    await store.create(record("b"))
    with pytest.raises(NoCapacity):
        await store.create(record("c"))
    await store.commit("b", 1, 0, [1], STOP)
    await store.create(record("c"))
    assert await store.load("b") is None
    assert await store.load("a") == record("a")
    store.release("a")
    await store.create(record("d"))
    assert await store.load("a") is None
