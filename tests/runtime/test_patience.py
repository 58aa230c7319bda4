"""One timer for many waits bounds each of them, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from moot.runtime.patience import Patience

LONG_S = 60.0


async def test_a_wait_ends_when_its_time_is_over() -> None:
    """A wait that lasts too long raises TimeoutError in its own task, and the next wait has its whole time again."""
    patience = Patience(0.02)
    never = asyncio.get_running_loop().create_future()
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError), patience.wait():
        await never
    assert asyncio.get_running_loop().time() - begin >= 0.02
    with patience.wait():
        await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]  # inside a task
    patience.close()


async def test_each_wait_is_bounded_by_its_own_beginning() -> None:
    """Waits that begin while older ones are under way are due later, whichever timer runs."""
    loop = asyncio.get_running_loop()
    patience = Patience(0.05)
    spent: list[float] = []

    async def one(pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        begin = loop.time()
        with pytest.raises(TimeoutError), patience.wait():
            await loop.create_future()
        spent.append(loop.time() - begin)

    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(one(0.01 * index) for index in range(5)))
    assert len(spent) == 5
    assert min(spent) >= 0.05


async def test_a_cancellation_is_heard() -> None:
    """A task cancelled inside a wait is cancelled, also in the moment in which its time is over."""
    patience = Patience(LONG_S)

    async def waiting() -> None:
        with patience.wait():
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(waiting())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    short = Patience(0.01)

    async def both() -> None:
        wait = short.wait()
        with wait:
            asyncio.get_running_loop().call_soon(wait.expire)
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(both())
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(task.cancel))
    with pytest.raises(asyncio.CancelledError):
        await task
    patience.close()
    short.close()


async def test_nothing_is_left_behind() -> None:
    """After the last wait no timer is made anew: what was one closes with its time."""
    patience = Patience(0.01)
    with patience.wait():
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)
    assert patience._timer is None
    assert not patience._waits
