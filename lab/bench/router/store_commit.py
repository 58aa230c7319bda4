"""What a commit costs the router: CPU with the store's own pipelines, and with redis-py's in their place.

    python -m lab.bench.store_commit [--callers 1,8,64] [--commits 6400] [--repetitions 7]

Each caller commits three tokens, waits for the reply, and goes on; all callers of a turn share a pipeline. A real
server, in a process of its own; CPU is this process's alone, and the two ways take turns.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError

from lab.bench.harness.intervals import Interval
from lab.bench.harness.pages import Bench, BenchConfig, Table
from moot.commands import embedded_store
from moot.config import option
from moot.core.types import SamplingParams
from moot.runtime.supervisor import Supervisor
from services.router.generation.request_types import RequestRecord
from services.router.store.config import StoreConfig
from services.router.store.connection import Argument, RedisConnection
from services.router.store.record_server import RedisLink, RedisStore

BENCH = Bench("store_commit", __doc__, measures=("services/router/store",))
START_TIMEOUT_S = 20.0
WARM_UP = 20


class LibraryPipelines(RedisConnection):
    """The same promises kept by the library's client: its pipelines, on a connection that its pool lends."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self._client = Redis.from_pool(self._pool)

    async def send(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        async with asyncio.timeout(self._deadline_s), self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, ReadOnlyError):
                raise reply
        return replies

    async def drop(self) -> None:
        await self._client.aclose()


WAYS = {"own": RedisConnection, "redis-py": LibraryPipelines}


async def cpu_us(url: str, way: type[RedisConnection], callers: int, commits: int) -> float:
    """Microseconds of CPU per commit."""
    config = StoreConfig(url=url, timeout_s=5, connect_timeout_s=5, prefix=uuid.uuid4().hex, ttl_s=20)
    link = RedisLink(config)
    link._connection = way(config)
    store = RedisStore(link, config)
    names = [f"r{index}" for index in range(callers)]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    for name in names:
        await store.create(RequestRecord(name, 1, (5, 6, 7), (), params, "model", "tokenizer"))

    async def caller(name: str, first: int, last: int) -> None:
        for step in range(first, last):
            await store.commit(name, 1, 3 * step, (11, 500, 70_000))

    await asyncio.gather(*(caller(name, 0, WARM_UP) for name in names))
    steps = commits // callers
    begin = time.process_time()
    await asyncio.gather(*(caller(name, WARM_UP, WARM_UP + steps) for name in names))
    used = time.process_time() - begin
    await link.close()
    return 1e6 * used / (steps * callers)


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    callers: tuple[int, ...] = option((1, 8, 64), help="callers at a time")
    commits: int = option(6400, help="commits of one turn, over all callers")


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    found: dict[int, dict[str, list[float]]] = {callers: {way: [] for way in WAYS} for callers in config.callers}
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        folder = Path(name)
        server = supervisor.spawn(
            "store", embedded_store.store_argv(folder), look=lambda: embedded_store.is_ready(folder)
        )
        supervisor.wait_ready([server], START_TIMEOUT_S)
        for _ in range(config.repetitions):
            for callers, ways in found.items():
                for way, connection in WAYS.items():
                    run = cpu_us(embedded_store.store_url(folder), connection, callers, config.commits)
                    ways[way].append(asyncio.run(run))
    rows = [
        [
            callers,
            *(Interval.of(values).text(1) for values in ways.values()),
            Interval.of([theirs - own for own, theirs in zip(*ways.values(), strict=True)]).text(1),
        ]
        for callers, ways in found.items()
    ]
    table = Table(("callers", "own pipelines, us of CPU a commit", "redis-py's", "difference"), rows)
    BENCH.publish(config, table, {"repetitions": config.repetitions, "found": found}, argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
