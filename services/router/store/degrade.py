"""The store that rounds use: records outlive the router while the server is there, and rounds go on while it is not.

Every open request is mirrored in memory. A commit goes into the mirror first, then to the server; when the server does
not take it the commit is not durable, and the upkeep task brings the missing tail there once it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from moot.core.errors import (
    CommitConflict,
    CommitFenced,
    CommitTerminal,
    NoCapacity,
    StoreError,
    StoreUnavailable,
)
from moot.core.types import FinishReason
from services.router.generation.request_types import RequestRecord
from services.router.store.config import StoreConfig
from services.router.store.record_server import RecordBehind, RedisLink, RedisStore, ServerFull, log_failure
from services.router.store.records import Mirror

_log = logging.getLogger(__name__)

_LOST = (CommitConflict, CommitFenced, CommitTerminal)


class DurableStore:
    """RequestStore on one server, in mode `degrade` or `required`. Call `start` first, `close` last.

    Both modes keep running requests going without the server; `required` refuses new ones (NoCapacity) while it is
    away or nearly full. `load` and `claim` need the server unless the request is this router's own, and raise
    StoreUnavailable: "not there" would be a wrong answer.
    """

    def __init__(self, config: StoreConfig, on_change: Callable[[bool], None] = lambda up: None) -> None:
        self._config = config
        self._link = RedisLink(config, on_change)
        self._server = RedisStore(self._link, config)
        self._mirrors: dict[str, Mirror] = {}
        self._nearly_full = False
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._link.up

    @property
    def num_unsynced(self) -> int:
        """Number of requests of which the server lacks something."""
        return sum(not mirror.is_synced for mirror in self._mirrors.values())

    async def start(self) -> None:
        """Learn whether the server is there, and start looking after the records."""
        await self._tend()
        self._upkeep = asyncio.create_task(self._keep_up(), name="store-upkeep")
        self._upkeep.add_done_callback(log_failure)

    async def create(self, record: RequestRecord) -> bool:
        if self._config.mode == "required" and (self._nearly_full or not self._link.up):
            raise NoCapacity("the store of request records takes no new requests now")
        if len(self._mirrors) >= self._config.max_open_records:
            if self._config.mode == "required":
                raise NoCapacity("too many requests are open")
            return False
        mirror = self._hold(record)
        durable = False
        if not self._nearly_full:
            try:
                await self._server.create(record)
                durable = True
            except StoreUnavailable as error:
                self._nearly_full = self._nearly_full or isinstance(error, ServerFull)
            except BaseException:
                self._drop(mirror)
                raise
        if durable:
            self._mark_synced(mirror, len(record.output_token_ids), record.finish_reason)
        elif self._config.mode == "required":
            self._drop(mirror)
            raise NoCapacity("the store of request records is not reachable")
        return durable

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        mirror = self._mirrors.get(request_id)
        if mirror is None:  # ended here, and its last commit is being sent again, or never held
            try:
                await self._server.commit(request_id, epoch, expected_length, token_ids, finish_reason)
            except StoreUnavailable:
                return False
            return True
        mirror.accept(epoch, expected_length, token_ids, finish_reason)
        mirror.touched_at = self._now()
        return await self._sync(mirror)

    def release(self, request_id: str) -> None:
        mirror = self._mirrors.get(request_id)
        if mirror is not None:
            mirror.released = True
            self._drop_if_over(mirror)

    async def load(self, request_id: str) -> RequestRecord | None:
        mirror = self._mirrors.get(request_id)
        try:
            record = await self._server.load(request_id)
        except StoreUnavailable:
            if mirror is None or mirror.lost is not None:
                raise
            return mirror.record()
        if mirror is None or mirror.lost is not None:
            return record
        if record is not None and (record.epoch > mirror.epoch or record.finish_reason is not None):
            return record  # claimed or cancelled, and this router does not know it yet
        return mirror.record()

    async def claim(self, request_id: str) -> RequestRecord:
        """Become the owner of a record. Raises LeaseHeld, CommitTerminal (it has ended: load it), RecordNotFound,
        StoreUnavailable."""
        record = await self._server.claim(request_id)
        mirror = self._hold(record)
        self._mark_synced(mirror, len(record.output_token_ids), None)
        return record

    async def cancel(self, request_id: str) -> bool:
        """End a request that any router may own; that router's next commit raises CommitTerminal."""
        return await self._server.cancel(request_id)

    async def close(self) -> None:
        """Bring what is missing to the server, within one deadline, then leave."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        try:
            async with asyncio.timeout(self._config.call_deadline_s):
                await self._sync_all()
        except TimeoutError:
            _log.warning("left records without their last tokens", extra={"count": self.num_unsynced})
        await self._link.close()

    async def _sync(self, mirror: Mirror) -> bool:
        """Bring to the server what it lacks of one request. False: not now. Raises when this router lost it."""
        async with mirror.lock:
            if mirror.lost is not None:
                raise mirror.lost
            if mirror.is_synced:
                return True
            if not self._link.up or (mirror.synced_length is None and self._nearly_full):
                return False
            length, finish_reason = len(mirror.output), mirror.finish_reason
            try:
                await self._append_or_repair(mirror)
            except StoreUnavailable as error:
                self._nearly_full = self._nearly_full or isinstance(error, ServerFull)
                return False
            except _LOST as error:
                _log.warning("request lost", extra={"cause": type(error).__name__, "request": mirror.request_id})
                mirror.lost = error
                self._drop_if_over(mirror)
                raise
            self._mark_synced(mirror, length, finish_reason)
            return mirror.is_synced

    async def _append_or_repair(self, mirror: Mirror) -> None:
        if mirror.synced_length is not None:
            tail = mirror.output[mirror.synced_length :]
            try:
                return await self._server.commit(
                    mirror.request_id, mirror.epoch, mirror.synced_length, tail, mirror.finish_reason
                )
            except (RecordBehind, CommitConflict):
                # The server lost something, or has more than it could tell us: an answer got lost.
                pass
        await self._server.repair(mirror.record())

    def _mark_synced(self, mirror: Mirror, length: int, finish_reason: FinishReason | None) -> None:
        mirror.synced_length = length
        mirror.synced_finish = finish_reason is not None
        mirror.lease_until = self._now() + self._config.lease_s
        self._drop_if_over(mirror)

    def _drop_if_over(self, mirror: Mirror) -> None:
        """Drop a mirror whose request is over here, and of which the server has all or another owner."""
        over = mirror.released or mirror.finish_reason is not None
        if over and (mirror.is_synced or (mirror.released and mirror.lost is not None)):
            self._drop(mirror)

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(self._config.upkeep_interval_s)
            await self._tend()

    async def _tend(self) -> None:
        self._drop_expired()
        try:
            memory = await self._link.probe()
        except StoreUnavailable:
            return
        limit = int(memory["maxmemory"]) * self._config.memory_limit_ratio
        self._nearly_full = 0 < limit <= int(memory["used_memory"])
        await self._sync_all()
        await self._renew_leases()

    async def _sync_all(self) -> None:
        await self._for_each(self._sync, [mirror for mirror in self._mirrors.values() if not mirror.is_synced])

    async def _renew_leases(self) -> None:
        """Renew leases of requests that have had no commit for a while, as they queue or their verifier is being
        replaced."""
        soon = self._now() + self._config.lease_s * 2 / 3
        held = [mirror for mirror in self._mirrors.values() if mirror.is_synced and not mirror.released]
        await self._for_each(self._renew, [mirror for mirror in held if mirror.lease_until < soon])

    async def _renew(self, mirror: Mirror) -> None:
        try:
            await self._server.renew(mirror.request_id, mirror.epoch)
        except RecordBehind:
            mirror.synced_length = None
        except _LOST as error:
            mirror.lost = error
        else:
            mirror.lease_until = self._now() + self._config.lease_s

    async def _for_each(self, action: Callable[[Mirror], Awaitable[object]], mirrors: Iterable[Mirror]) -> None:
        """Do something for many requests, a few pipelines' worth at a time, so that repairs leave room for commits."""
        pending = [mirror for mirror in mirrors if mirror.lost is None]
        for start in range(0, len(pending), self._config.max_batch_calls):
            chunk = pending[start : start + self._config.max_batch_calls]
            for result in await asyncio.gather(*map(action, chunk), return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, StoreError):
                    raise result

    def _hold(self, record: RequestRecord) -> Mirror:
        mirror = Mirror.of(record, self._now(), self._config.lease_s)
        self._mirrors[record.request_id] = mirror
        return mirror

    def _drop(self, mirror: Mirror) -> None:
        if self._mirrors.get(mirror.request_id) is mirror:
            del self._mirrors[mirror.request_id]

    def _drop_expired(self) -> None:
        """Drop mirrors that have outlived the keys they stand for."""
        now = self._now()
        for mirror in list(self._mirrors.values()):
            if now - mirror.touched_at > self._config.ttl_ms(mirror.finish_reason is not None) / 1000:
                self._drop(mirror)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
