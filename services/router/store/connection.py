"""One connection to the server of records: commands in pipelines, and a deadline for each pipeline.

Which server holds the records now: what its sentinels say, asked all at once whenever a connection is to be made.

The library's own client asks them one after the other: a sentinel that is gone without a word would use up the time
that a commit may take, each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from moot.core.errors import ConfigError
from services.router.store.config import Address, StoreConfig, parse_address

_log = logging.getLogger(__name__)


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


Argument = str | int | bytes


class RedisConnection:
    """Connects when something is to be sent. Raises ConfigError for an address that is none.

    The library's client is left out of the token path: its pipelines bound each reply by a timer of its own, and pack
    arguments of every kind.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._deadline_s = config.attempt_s
        try:
            self._pool = Redis.from_url(
                config.server_url,
                # A pipeline has a deadline: none for each reply beside it.
                socket_timeout=None,
                socket_connect_timeout=config.connect_timeout_s,
                # The library's own default is ten attempts, seconds in all.
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                driver_info=None,
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            ).connection_pool
        except ValueError:
            # Without the address and without what was raised, which quotes parts of it: it may hold a password.
            raise ConfigError("the address of the store is not redis://, rediss:// or unix://") from None
        self._connection = self._pool.make_connection()
        self._sentinels = self._sentinels_of(config) if config.sentinels else None

    def _sentinels_of(self, config: StoreConfig) -> Sentinels:
        if not issubclass(self._pool.connection_class, Connection):
            raise ConfigError("--redis-sentinels: a server at a unix:// address has none")
        own = {"username": config.sentinel_username, "password": config.sentinel_password, "db": 0}
        return Sentinels(
            [parse_address(sentinel) for sentinel in config.sentinels],
            config.sentinel_master,
            lambda host, port: self._connection_to(host, port, **own),
            config.connect_timeout_s,
        )

    def _connection_to(self, host: str, port: int, **changes: Any) -> AbstractConnection:
        return self._pool.connection_class(**{**self._pool.connection_kwargs, "host": host, "port": port, **changes})

    async def send(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """The replies in the commands' order; a refusal stands among them as its ResponseError.

        Raises RedisError, OSError or TimeoutError; what is left on the connection is never read then.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                if not self._connection.is_connected:
                    await self._connect()
                connection = self._connection
                await connection.send_packed_command(b"".join(map(pack, commands)), check_health=False)
                return [await self._reply() for _ in commands]
        except (RedisError, OSError, TimeoutError):
            await self.drop()
            raise

    async def _connect(self) -> None:
        if self._sentinels is not None:
            self._connection = self._connection_to(*await self._sentinels.master())
        await self._connection.connect()
        await self._connection.send_packed_command(pack(("INFO", "replication")), check_health=False)
        facts = await self._connection.read_response()
        if isinstance(facts, bytes) and b"role:slave" in facts:
            # It would take no commit; who is behind the address, or what the sentinels say, may change soon.
            raise RedisConnectionError("the server follows another")

    async def drop(self) -> None:
        """The next pipeline gets a new connection."""
        broken, self._connection = self._connection, self._pool.make_connection()
        try:
            await broken.disconnect(nowait=True)
        except (RedisError, OSError, TimeoutError) as error:
            _log.debug("closing a broken connection", extra={"cause": type(error).__name__})

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except ReadOnlyError:
            # The master has become a replica: another connection finds the one that follows it.
            raise
        except ResponseError as error:
            return error


def pack(command: Sequence[Argument]) -> bytes:
    """A command as Redis reads it: an array of bulk strings."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        if not isinstance(argument, bytes):
            argument = str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(argument), argument))
    return b"".join(parts)
