"""Records on the server: each method is one server-side function, and says what the server said.

`RedisLink` is the one way to the server: function calls of many requests, in pipelines, by one task. Callers put a call
on a bounded queue and wait for its own future; one worker task takes whatever the queue holds (the commits of one
answer frame arrive in one tick of the loop) and sends it as one pipeline. So a cancelled caller cancels nothing on the
connection, and no reply can reach another request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

from redis.exceptions import RedisError, ResponseError

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
from moot.rpc.link import FrameQueue, FrameQueueFull
from moot.runtime.patience import Patience
from services.router.generation.request_types import RequestRecord
from services.router.store.config import StoreConfig
from services.router.store.connection import Argument, RedisConnection
from services.router.store.records import decode_record, encode_fields, finish_text, keys_of, pack_ids

_log = logging.getLogger(__name__)

_SOURCE = resources.files(__package__).joinpath("functions.lua").read_text()
# Part of every function's name: routers of two versions share a server during a rolling update.
VERSION = hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]
LIBRARY = _SOURCE.replace("@VERSION@", VERSION)


_NOT_REACHABLE = "the store of request records is not reachable"


class _Call(NamedTuple):
    command: tuple[Argument, ...]
    reply: asyncio.Future[Any]


def _num_bytes(call: _Call) -> int:
    return sum(len(part) if isinstance(part, str | bytes) else 8 for part in call.command)


class ServerFull(StoreUnavailable):
    """The server refuses writes until it has memory again."""


class RedisLink:
    """The way to the server. `up` falls with the first batch that fails twice, and rises with a `probe` that succeeds:
    while it is down, calls fail at once instead of waiting for a timeout each. `on_change(up)` is called at every
    change.

    Needs a running event loop when it is made; raises ConfigError for an address that is none. Every call ends within
    `config.call_deadline_s`.
    """

    def __init__(self, config: StoreConfig, on_change: Callable[[bool], None] = lambda up: None) -> None:
        self._config = config
        self._on_change = on_change
        self._connection = RedisConnection(config)
        self._patience = Patience(config.call_deadline_s)
        self._queue: FrameQueue[_Call] = FrameQueue(
            config.max_queued_calls, config.max_batch_calls, config.max_batch_bytes, _num_bytes
        )
        self._up: bool | None = None
        self._worker = asyncio.create_task(self._work(), name="store-link")
        self._worker.add_done_callback(log_failure)

    @property
    def up(self) -> bool:
        return self._up is not False

    async def function(self, name: str, keys: Sequence[str], *arguments: Argument) -> Any:
        """Reply of the server-side function `name`; raises StoreUnavailable. It may have been applied all the same."""
        if not self.up:
            raise StoreUnavailable(_NOT_REACHABLE)
        return await self._enqueue("FCALL", f"moot_{name}_{VERSION}", len(keys), *keys, *arguments)

    async def probe(self) -> dict[str, str]:
        """The server's INFO memory, asked for even while the link is down; raises StoreUnavailable."""
        reply = await self._enqueue("INFO", "memory")
        self._set_up(True)
        lines = reply.decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    async def close(self) -> None:
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._fail_all(self._queue.take_all(), "the store is closed")
        self._patience.close()
        await self._connection.drop()

    async def _enqueue(self, *command: Argument) -> Any:
        if self._worker.done():
            raise StoreUnavailable("the store is closed")
        call = _Call(command, asyncio.get_running_loop().create_future())
        try:
            self._queue.put(call)
            with self._patience.wait():
                return await call.reply
        except FrameQueueFull as error:
            raise StoreUnavailable("too many calls wait for the store") from error
        except TimeoutError as error:
            raise StoreUnavailable("the store did not answer in time") from error

    async def _work(self) -> None:
        while True:
            batch = [call for call in await self._queue.next_frame() if not call.reply.done()]
            try:
                await self._serve(batch)
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("store lost", extra={"cause": type(error).__name__})
                self._set_up(False)
                # Those behind it would each wait for the same timeout.
                self._fail_all([*batch, *self._queue.take_all()], _NOT_REACHABLE)
            except BaseException as error:
                self._set_up(False)
                self._fail_all(batch, f"the store's link ended: {type(error).__name__}")
                raise

    async def _serve(self, batch: Sequence[_Call]) -> None:
        if not batch:
            return
        replies = await self._send_with_retry([call.command for call in batch])
        missing = [index for index, reply in enumerate(replies) if _is_missing_function(reply)]
        if missing:
            # None of the others was refused for it, and these are all still in their order.
            loaded, *again = await self._send_with_retry(
                [("FUNCTION", "LOAD", "REPLACE", LIBRARY), *(batch[index].command for index in missing)]
            )
            if isinstance(loaded, Exception):
                _log.error("the server refused the function library", extra={"cause": _kind(loaded)})
            for index, reply in zip(missing, again, strict=True):
                replies[index] = reply
        for call, reply in zip(batch, replies, strict=True):
            if call.reply.done():
                continue
            if isinstance(reply, Exception):
                call.reply.set_exception(_unavailable(reply))
            else:
                call.reply.set_result(reply)

    async def _send_with_retry(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Send a batch, twice if need be: every function is idempotent, so a second attempt is safe whatever became of
        the first."""
        try:
            return await self._connection.send(commands)
        except (RedisError, OSError, TimeoutError):
            return await self._connection.send(commands)

    @staticmethod
    def _fail_all(calls: Sequence[_Call], problem: str) -> None:
        for call in calls:
            if not call.reply.done():
                call.reply.set_exception(StoreUnavailable(problem))

    def _set_up(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._on_change(up)


def log_failure(task: asyncio.Task[None]) -> None:
    """Log the end of a task: one that ends by itself is a bug, and must not be found out by its silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("background task ended", exc_info=error, extra={"task": task.get_name()})


def _is_missing_function(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and "function not found" in str(reply).lower()


def _kind(error: Exception) -> str:
    """The error's class and code; its text may quote arguments, which are tokens."""
    return f"{type(error).__name__} {str(error).split(' ', 1)[0][:20]}"


def _unavailable(error: Exception) -> StoreUnavailable:
    if "OOM" in _kind(error) or "OutOfMemory" in type(error).__name__:
        return ServerFull("the store of request records has no memory left")
    _log.error("the store refused a call", extra={"cause": _kind(error)})
    return StoreUnavailable("the store of request records refused the call")


class RecordBehind(StoreUnavailable):
    """The server's record is missing or shorter than its owner's: repair it."""


class RedisStore:
    """RequestStore on the server. Raises StoreUnavailable when the server cannot be asked; `DurableStore` goes on
    without it."""

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
        _check(status)

    async def repair(self, record: RequestRecord) -> None:
        """Make the server's record equal to `record`, whatever part of it is missing. Safe to repeat."""
        status, _, _ = await self._call("repair", record.request_id, *self._whole(record))
        _check(status)

    async def renew(self, request_id: str, epoch: int) -> None:
        """Prolong the lease of a request that waits. Raises RecordBehind, CommitFenced, CommitTerminal."""
        status, _, _ = await self._call(
            "renew", request_id, epoch, self._config.lease_ms, self._config.ttl_ms(finished=False)
        )
        if status in ("MISSING", "CONFLICT"):
            raise RecordBehind("the record is missing or older than its owner")
        _check(status)

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
        _check(status)
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
        """Call a function: returns status, a number (output length, or milliseconds left of a lease), and the record
        when it was asked for."""
        keys = keys_of(self._config.prefix, request_id)
        status, number, *raw = await self._link.function(function, keys, *arguments)
        return status.decode(), number, raw[0] if raw else None


_REFUSED: dict[str, tuple[type[StoreError], str]] = {
    "FENCED": (CommitFenced, "another router has claimed this request"),
    "TERMINAL": (CommitTerminal, "this request has ended"),
    "CONFLICT": (CommitConflict, "the record has other tokens than expected"),
}


def _check(status: str) -> None:
    """Raise what a status stands for; `OK` and `DUP` (the same call again) are success."""
    if status not in ("OK", "DUP"):
        kind, text = _REFUSED.get(status, (StoreError, f"unexpected status {status} of a record"))
        raise kind(text)


def _decode(request_id: str, raw: Any) -> RequestRecord:
    flat, prompt, spans = raw
    return decode_record(request_id, dict(zip(flat[::2], flat[1::2], strict=True)), prompt, spans)
