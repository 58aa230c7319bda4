"""TCP proxies between the processes of a test: partitions, cuts and resets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from moot.testing import TcpProxy
from tests.waiting import GIVE_UP_S

ResultT = TypeVar("ResultT")


class Proxies:
    """TCP proxies on a thread with a loop of its own, so that synchronous tests can use them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._proxies: list[TcpProxy] = []

    def to(self, address: str) -> Proxy:
        proxy = TcpProxy.to(address)
        self._proxies.append(proxy)
        self.run(proxy.start())
        return Proxy(self, proxy)

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(GIVE_UP_S)

    def close(self) -> None:
        for proxy in self._proxies:
            self.run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GIVE_UP_S)
        self._loop.close()


@dataclass(frozen=True, slots=True)
class Proxy:
    """The network between the router and one peer."""

    owner: Proxies
    proxy: TcpProxy

    @property
    def address(self) -> str:
        return self.proxy.address

    def partition(self, *directions: str) -> None:
        """Stop `up` (to the peer), `down` (to the router), or both when none is named."""
        self._do(lambda: self.proxy.partition(*directions))

    def heal(self) -> None:
        self._do(self.proxy.heal)

    def cut(self) -> None:
        self._do(self.proxy.cut)

    def reset(self) -> None:
        self._do(self.proxy.reset)

    def _do(self, action: Callable[[], None]) -> None:
        async def work() -> None:
            action()

        self.owner.run(work())
