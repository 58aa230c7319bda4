"""Records in this process only, for a router without a server: the same rules, and nothing is durable."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from moot.core.errors import CommitConflict, CommitTerminal, LeaseHeld, NoCapacity, RecordNotFound
from moot.core.types import FinishReason
from services.router.generation.request_types import RequestRecord
from services.router.store.records import Mirror


class MemoryStore:
    """RequestStore in memory; `create` and `commit` return False (not durable). At most `max_records`: the oldest that
    no request works on make room, and when there is none a new request is refused with NoCapacity."""

    def __init__(self, *, lease_s: float = 5.0, max_records: int = 65536) -> None:
        self._lease_s = lease_s
        self._max_records = max_records
        self._records: dict[str, Mirror] = {}

    async def create(self, record: RequestRecord) -> bool:
        held = self._records.get(record.request_id)
        if held is not None:
            if held.epoch == record.epoch and held.record() == record:
                return False
            raise CommitConflict("a request of this id exists already")
        self._make_room()
        self._records[record.request_id] = Mirror.of(record, self._now(), self._lease_s)
        return False

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        mirror = self._records.get(request_id)
        if mirror is None:
            raise RecordNotFound("no record of this request")
        mirror.accept(epoch, expected_length, token_ids, finish_reason)
        mirror.lease_until = self._now() + self._lease_s
        return False

    def release(self, request_id: str) -> None:
        mirror = self._records.get(request_id)
        if mirror is not None:
            mirror.released = True

    async def load(self, request_id: str) -> RequestRecord | None:
        mirror = self._records.get(request_id)
        return None if mirror is None else mirror.record()

    async def claim(self, request_id: str) -> RequestRecord:
        mirror = self._records.get(request_id)
        if mirror is None:
            raise RecordNotFound("no record of this request")
        if mirror.finish_reason is not None:
            raise CommitTerminal("this request has ended")
        if (left := mirror.lease_until - self._now()) > 0:
            raise LeaseHeld("this request is being served", left)
        mirror.header = dataclasses.replace(mirror.header, epoch=mirror.epoch + 1)
        mirror.lease_until = self._now() + self._lease_s
        mirror.released = False
        return mirror.record()

    async def cancel(self, request_id: str) -> bool:
        mirror = self._records.get(request_id)
        if mirror is None or mirror.finish_reason is not None:
            return False
        mirror.finish_reason = FinishReason.ABORT
        return True

    async def close(self) -> None:
        self._records.clear()

    def _make_room(self) -> None:
        if len(self._records) < self._max_records:
            return
        over = (key for key, mirror in self._records.items() if mirror.released or mirror.finish_reason is not None)
        oldest = next(over, None)
        if oldest is None:
            raise NoCapacity("too many requests are open")
        del self._records[oldest]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
