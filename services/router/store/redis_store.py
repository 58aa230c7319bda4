"""Records on the server, as they are: each method is one server-side function, and says what the server said."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from moot.core.errors import (
    CommitConflict,
    CommitFenced,
    CommitTerminal,
    LeaseHeld,
    RecordNotFound,
    StoreError,
    StoreUnavailable,
)
from moot.core.types import FinishReason
from services.router.store.config import StoreConfig
from services.router.store.connection import Argument
from services.router.store.link import RedisLink
from services.router.store.records import Keys, decode_record, encode_fields, finish_text, pack_ids
from services.router.types import RequestRecord


class RecordBehind(StoreUnavailable):
    """The server's record is missing or shorter than its owner's: repair it."""


class RedisStore:
    """Raises StoreUnavailable when the server cannot be asked; whoever wants to go on without it wraps this."""

    def __init__(self, link: RedisLink, config: StoreConfig, owner: str | None = None) -> None:
        self._link = link
        self._config = config
        self.owner = owner or uuid.uuid4().hex

    async def create(self, record: RequestRecord) -> None:
        """Raises CommitConflict when another owner already has a record of this id."""
        status, _, _ = await self._call("create", record.request_id, *self._whole(record))
        if status == "CONFLICT":
            raise CommitConflict("a request of this id exists already")

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Append; the same call twice counts once. Raises RecordBehind, CommitConflict, -Fenced, -Terminal."""
        status, length, _ = await self._call(
            "commit",
            request_id,
            epoch,
            expected_length,
            pack_ids(token_ids),
            self._config.lease_ms,
            self._config.ttl_ms(finish_reason is not None),
            finish_text(finish_reason),
        )
        if status == "MISSING" or (status == "CONFLICT" and length < expected_length):
            raise RecordBehind("the record lacks committed tokens")
        self._check(status)

    async def repair(self, record: RequestRecord) -> None:
        """Make the server's record equal to `record`, whatever part of it is missing. Safe to repeat."""
        status, _, _ = await self._call("repair", record.request_id, *self._whole(record))
        self._check(status)

    async def renew(self, request_id: str, epoch: int) -> None:
        """Prolong the lease of a request that waits. Raises RecordBehind, CommitFenced, CommitTerminal."""
        status, _, _ = await self._call(
            "renew", request_id, epoch, self._config.lease_ms, self._config.ttl_ms(finished=False)
        )
        if status in ("MISSING", "CONFLICT"):
            raise RecordBehind("the record is missing or older than its owner")
        self._check(status)

    async def cancel(self, request_id: str) -> bool:
        """End a request from outside; its owner's next commit raises CommitTerminal. False: no running record."""
        status, _, _ = await self._call("cancel", request_id, self._config.ttl_ms(finished=True))
        return status == "OK"

    async def claim(self, request_id: str) -> RequestRecord:
        """Become the owner. Raises LeaseHeld, CommitTerminal (finished: load it), RecordNotFound."""
        status, left_ms, raw = await self._call(
            "claim",
            request_id,
            self.owner,
            uuid.uuid4().hex,
            self._config.lease_ms,
            self._config.ttl_ms(finished=False),
        )
        if status == "HELD":
            raise LeaseHeld("another router is serving this request", left_ms / 1000)
        if status == "MISSING":
            raise RecordNotFound("no record of this request")
        self._check(status)
        return _decode(request_id, raw)

    async def load(self, request_id: str) -> RequestRecord | None:
        _, _, raw = await self._call("load", request_id)
        return _decode(request_id, raw) if raw[0] else None

    def _whole(self, record: RequestRecord) -> list[Argument]:
        return [
            record.epoch,
            self.owner,
            self._config.lease_ms,
            self._config.ttl_ms(record.finish_reason is not None),
            finish_text(record.finish_reason),
            pack_ids(record.prompt_token_ids),
            pack_ids(record.output_token_ids),
            *encode_fields(record),
        ]

    async def _call(self, function: str, request_id: str, *arguments: Argument) -> tuple[str, int, Any]:
        """Status, a number (output length, or milliseconds left of a lease), and the record when it was asked for."""
        keys = Keys.of(self._config.prefix, request_id)
        status, number, *raw = await self._link.function(function, keys, *arguments)
        return status.decode(), number, raw[0] if raw else None

    @staticmethod
    def _check(status: str) -> None:
        """`OK` and `DUP` (the same call again) are success."""
        if status == "FENCED":
            raise CommitFenced("another router has claimed this request")
        if status == "TERMINAL":
            raise CommitTerminal("this request has ended")
        if status == "CONFLICT":
            raise CommitConflict("the record has other tokens than expected")
        if status not in ("OK", "DUP"):
            raise StoreError(f"unexpected status {status} of a record")


def _decode(request_id: str, raw: Any) -> RequestRecord:
    flat, prompt, spans = raw
    return decode_record(request_id, dict(zip(flat[::2], flat[1::2], strict=True)), prompt, spans)
