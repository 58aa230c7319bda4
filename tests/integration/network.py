"""A TCP proxy between two processes of a test, on a thread with a loop of its own, so that synchronous tests use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from moot.testing import TcpProxy
from tests.waiting import GIVE_UP_S


class Proxy:
    """The network between the router and one peer."""

    def __init__(self, address: str) -> None:
        self._proxy = TcpProxy.to(address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy to {address}", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._loop).result(GIVE_UP_S)

    @property
    def address(self) -> str:
        return self._proxy.address

    def partition(self, *directions: str) -> None:
        """Stop `up` (to the peer), `down` (to the router), or both when none is named."""
        self._do(lambda: self._proxy.partition(*directions))

    def heal(self) -> None:
        self._do(self._proxy.heal)

    def cut(self) -> None:
        self._do(self._proxy.cut)

    def reset(self) -> None:
        self._do(self._proxy.reset)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.close(), self._loop).result(GIVE_UP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GIVE_UP_S)
        self._loop.close()

    def _do(self, action: Callable[[], None]) -> None:
        async def work() -> None:
            action()

        asyncio.run_coroutine_threadsafe(work(), self._loop).result(GIVE_UP_S)
