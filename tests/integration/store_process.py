"""The record server of a test, and what it has of a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

from moot.commands import embedded_store
from services.router.generation.request_types import RequestRecord
from services.router.store import StoreConfig
from services.router.store.record_server import RedisLink, RedisStore
from tests.integration.asking import Reply
from tests.integration.processes import START_TIMEOUT_S, Signalled
from tests.waiting import GIVE_UP_S, until


@dataclass(slots=True)
class Store(Signalled):
    """The record server, on a Unix socket; made, it is being started. Its data survive a restart."""

    folder: Path

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        (self.folder / embedded_store.SOCKET_NAME).unlink(missing_ok=True)
        self.child = self.supervisor.spawn(
            "store",
            embedded_store.store_argv(self.folder),
            essential=False,
            look=lambda: embedded_store.is_ready(self.folder),
        )

    @property
    def url(self) -> str:
        return embedded_store.store_url(self.folder)

    def restart(self) -> None:
        self._start()
        self.supervisor.wait_ready([self.child], START_TIMEOUT_S)

    def client(self) -> Redis:
        """For looking and for breaking."""
        return Redis.from_url(self.url, socket_timeout=GIVE_UP_S)


def assert_recorded(url: str, reply: Reply) -> None:
    """Soon the server has a whole record of the request: all tokens, and how it ended."""

    async def load() -> RequestRecord | None:
        config = StoreConfig(url=url, timeout_s=GIVE_UP_S)
        link = RedisLink(config)
        try:
            return await RedisStore(link, config).load(f"{reply.request_id}-0")
        finally:
            await link.close()

    def whole_record() -> RequestRecord | None:
        record = asyncio.run(load())
        return record if record is not None and record.finish_reason is not None else None

    record = until(whole_record, f"the record of {reply.request_id}")
    assert list(record.output_token_ids) == reply.token_ids
    assert record.finish_reason.value == reply.finish_reason
