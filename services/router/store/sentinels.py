"""Which server holds the records now: what its sentinels say, asked all at once whenever a connection is to be made.

The library's own client asks them one after the other: a sentinel that is gone without a word would use up the time
that a commit may take, each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import RedisError

from moot.core.errors import ConfigError

_log = logging.getLogger(__name__)

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """`host:port`, IPv6 in brackets. Raises ConfigError naming the bad one."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--redis-sentinels: {text!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Sentinels:
    """`connect(host, port)` makes a connection to a sentinel that is not connected yet."""

    def __init__(
        self,
        addresses: Sequence[Address],
        master: str,
        connect: Callable[[str, int], AbstractConnection],
        timeout_s: float,
    ) -> None:
        self._addresses = tuple(addresses)
        self._master = master
        self._connect = connect
        self._timeout_s = timeout_s

    async def master(self) -> Address:
        """The address that most of them name: at once where that is more than half of all, else of those that have
        answered in time. One that was cut off from the others and still names the old master is outvoted.

        Raises MasterNotFoundError where none of them names any.
        """
        tasks = [asyncio.create_task(self._ask(*address)) for address in self._addresses]
        votes: Counter[Address] = Counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                for answer in asyncio.as_completed(tasks):
                    if (named := await answer) is None:
                        continue
                    votes[named] += 1
                    if 2 * votes[named] > len(tasks):
                        return named
        except TimeoutError:
            _log.debug("some sentinels did not answer in time")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not votes:
            _log.warning("no sentinel names a master", extra={"asked": len(tasks), "master": self._master})
            raise MasterNotFoundError("no sentinel names a master")
        return votes.most_common(1)[0][0]

    async def _ask(self, host: str, port: int) -> Address | None:
        connection = self._connect(host, port)
        try:
            await connection.connect()
            await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master, check_health=False)
            reply: Any = await connection.read_response()
            return (reply[0].decode(), int(reply[1])) if reply else None
        except (RedisError, OSError, TimeoutError) as error:
            _log.debug("sentinel not asked", extra={"address": f"{host}:{port}", "cause": type(error).__name__})
            return None
        finally:
            await connection.disconnect(nowait=True)
