"""One connection to the server of records: commands in pipelines, and a deadline for each pipeline.

The library makes connections, and asks for the master's address when it makes one. Its pipelines are not used, because
they cost a commit more than a round may lose; nor is its way to ask sentinels, which believes the first that answers
(docs/decisions/0019).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from moot.core.errors import ConfigError
from services.router.store.config import Address, StoreConfig, parse_address

_log = logging.getLogger(__name__)

Argument = str | int | bytes
# A fifth of what redis-py takes to pack a command. Its stub knows commands of one word only.
pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


class Sentinels:
    """Sentinels, asked all at once. `options`: what redis.asyncio.Redis takes; host and port are each sentinel's."""

    def __init__(self, addresses: Sequence[Address], timeout_s: float, **options: Any) -> None:
        self._addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._options = options

    async def discover_master(self, name: str) -> Address:
        """The address that most sentinels name: at once where that is more than half of all, else of those that have
        answered in time. One that was cut off from the others and still names the old master is outvoted.

        Raises MasterNotFoundError where none of them names any.
        """
        tasks = [asyncio.create_task(self._ask(*address, name)) for address in self._addresses]
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
            _log.warning("no sentinel names a master", extra={"asked": len(tasks), "master": name})
            raise MasterNotFoundError("no sentinel names a master")
        return votes.most_common(1)[0][0]

    async def _ask(self, host: str, port: int, name: str) -> Address | None:
        """Ask one sentinel by a connection for this question alone: certificates are read anew, and none is found
        dead."""
        try:
            async with Redis(**{**self._options, "host": host, "port": port, "decode_responses": True}) as sentinel:
                named: Address | None = await sentinel.sentinel_get_master_addr_by_name(name)
                return named
        except (RedisError, OSError, TimeoutError) as error:
            _log.debug("sentinel not asked", extra={"address": f"{host}:{port}", "cause": type(error).__name__})
            return None


class RedisConnection:
    """A connection to the server, made when something is to be sent. Raises ConfigError for an address that is none."""

    def __init__(self, config: StoreConfig) -> None:
        self._deadline_s = config.attempt_s
        self._pool = pool_of(config)
        self._connection = self._pool.make_connection()

    async def send(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Send commands; returns the replies in the commands' order; a refusal stands among them as its ResponseError.

        Raises RedisError, OSError or TimeoutError; what is left on the connection is never read then.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                if not self._connection.is_connected:
                    await self._connection.connect()
                await self._connection.send_packed_command(b"".join(map(pack, commands)), check_health=False)
                return [await self._reply() for _ in commands]
        except (RedisError, OSError, TimeoutError):
            await self.drop()
            raise

    async def drop(self) -> None:
        """Drop the connection: the next pipeline gets a new one, with what the files of its certificates say then."""
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


def pool_of(config: StoreConfig) -> ConnectionPool:
    """A pool that makes connections to the server at the address, or to the one that its sentinels name at that
    time."""
    options: dict[str, Any] = {
        # A pipeline has a deadline: none for each reply beside it.
        "socket_timeout": None,
        "socket_connect_timeout": config.connect_timeout_s,
        # The library's own default is ten attempts, seconds in all.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    try:
        options |= parse_url(config.server_url)
    except ValueError:
        # Without the address and without what was raised, which quotes parts of it: it may hold a password.
        raise ConfigError("the address of the store is not redis://, rediss:// or unix://") from None
    if not config.sentinels:
        return ConnectionPool(redis_connect_func=greet, **options)
    kind = options.pop("connection_class", Connection)
    if not issubclass(kind, Connection):
        raise ConfigError("--redis-sentinels: a server at a unix:// address has none")
    options["ssl"] = issubclass(kind, SSLConnection)
    own = {"username": config.sentinel_username, "password": config.sentinel_password, "db": 0}
    addresses = [parse_address(sentinel) for sentinel in config.sentinels]
    sentinels = Sentinels(addresses, config.connect_timeout_s, **(options | own))
    return SentinelConnectionPool(config.sentinel_master, sentinels, redis_connect_func=greet, **options)


async def greet(connection: AbstractConnection) -> None:
    """Begin a connection. Raises ConnectionError for a replica, which would take no commit."""
    await connection.on_connect()
    await connection.send_packed_command(pack(("INFO", "replication")), check_health=False)
    facts = await connection.read_response()
    if isinstance(facts, bytes) and b"role:slave" in facts:
        # Who is behind the address, or what the sentinels say, may change soon.
        raise RedisConnectionError("the server follows another")
