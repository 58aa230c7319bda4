"""The pool of drafts to verify: its bound, its pause, its order, and that no place is ever lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from moot.core.errors import DeadlineExceeded
from services.router.peers.draft_pool import DraftPool
from tests.waiting import GIVE_UP_S


async def test_first_draft_runs_and_later_ones_wait() -> None:
    """What is sent while nothing runs is taken at once; the rest is the depth, until the running ones are answered."""
    depths: list[int] = []
    pool = DraftPool(2, depths.append)
    for session in (1, 2, 3):
        await pool.reserve(session, 1)
        pool.enter(session)
        if session == 1:
            assert pool.depth == 0
    assert pool.depth == 2
    pool.leave(1)
    assert pool.depth == 0
    assert sum(depths) == 0
    pool.leave(2)
    pool.leave(3)
    pool.leave(3)
    assert pool.num_held == 0


async def test_drafting_pauses_behind_a_full_pool_in_order() -> None:
    """Requests behind a full pool may not even begin to draft, and go on first come first served."""
    pool = DraftPool(1)
    await pool.reserve(1, 1)
    pool.enter(1)
    await pool.reserve(2, 1)
    order: list[int] = []

    async def draft(session: int) -> None:
        await pool.reserve(session, GIVE_UP_S)
        order.append(session)
        pool.enter(session)

    tasks = [asyncio.create_task(draft(session)) for session in (3, 4, 5)]
    await asyncio.sleep(0)
    assert order == []
    assert pool.num_paused == 3
    pool.enter(2)
    assert pool.depth == 1
    for answered in (1, 2, 3, 4):
        pool.leave(answered)
        await asyncio.sleep(0)
        assert pool.depth <= 1
    await asyncio.gather(*tasks)
    assert order == [3, 4, 5]


def test_depth_never_exceeds_the_batch() -> None:
    """Over random schedules with cancellations the depth stays within the batch and every place comes back."""

    async def main(seed: int) -> None:
        draw = random.Random(seed)
        batch = draw.randint(1, 4)
        pool = DraftPool(batch)
        entered: list[int] = []
        most = 0

        async def request(session: int) -> None:
            try:
                for _ in range(5):
                    await pool.reserve(session, GIVE_UP_S)
                    await asyncio.sleep(draw.choice((0, 0, 0.001)))
                    pool.enter(session)
                    entered.append(session)
                    while session in entered:  # noqa: ASYNC110 - until the verifier below answers
                        await asyncio.sleep(0)
            finally:
                if session in entered:
                    entered.remove(session)
                pool.leave(session)

        async def verifier() -> None:
            nonlocal most
            while True:
                most = max(most, pool.depth)
                assert pool.depth <= batch
                for session in draw.sample(entered, min(len(entered), batch)):
                    entered.remove(session)
                    pool.leave(session)
                await asyncio.sleep(0)

        steps = asyncio.create_task(verifier())
        tasks = [asyncio.create_task(request(session)) for session in range(12)]
        await asyncio.sleep(0.002)
        for task in draw.sample(tasks, 4):
            task.cancel()
        await asyncio.wait(tasks, timeout=GIVE_UP_S)
        assert all(task.done() for task in tasks)
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert pool.num_held == 0
        assert pool.num_paused == 0

    for seed in range(20):
        asyncio.run(main(seed))


async def test_the_pause_has_a_bound() -> None:
    """A request that gets no place in time fails, and keeps nothing."""
    pool = DraftPool(1)
    await pool.reserve(1, 1)
    with pytest.raises(DeadlineExceeded):
        await pool.reserve(2, 0.01)
    assert pool.num_paused == 0
    assert pool.num_held == 1


async def test_a_lost_verifier_releases_those_who_wait() -> None:
    """When the verifier is gone nobody goes on waiting for its pool."""
    pool = DraftPool(1)
    await pool.reserve(1, 1)
    waiting = asyncio.create_task(pool.reserve(2, 3600))
    await asyncio.sleep(0)
    pool.clear()
    await asyncio.wait_for(waiting, GIVE_UP_S)
    assert pool.num_held == 0


def test_entering_needs_a_place() -> None:
    """A draft without a reserved place would break the bound: it is refused."""
    with pytest.raises(ValueError, match="place"):
        DraftPool(1).enter(1)
