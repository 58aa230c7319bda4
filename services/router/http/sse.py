"""Server-sent events, and noticing that the reader is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Send

from services.router.http.middleware import ClientGone
from services.router.patience import Patience

ResultT = TypeVar("ResultT")
DONE = b"data: [DONE]\n\n"


# One encoder for all: json.dumps makes a new one for each call that asks for anything but its defaults.
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body).encode() + b"\n\n"


class EventStream:
    """Writes events; the headers go out with the first, so that an error before it still has its status code."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send_message = send
        self._patience = Patience(timeout_s)
        self.started = False

    async def send(self, parts: Iterable[bytes], headers: dict[str, str] | None = None) -> None:
        """`headers` count only in the first call. Raises ClientGone when the reader takes nothing for too long."""
        if not self.started:
            self.started = True
            fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            fields |= {"x-accel-buffering": "no"} | (headers or {})
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
            await self._write({"type": "http.response.start", "status": 200, "headers": raw})
        await self._write({"type": "http.response.body", "body": b"".join(parts), "more_body": True})

    async def close(self) -> None:
        await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    def release(self) -> None:
        """Nothing more is written, whether the stream was closed or not."""
        self._patience.close()

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            with self._patience.wait():
                await self._send_message(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


async def send_whole(response: Response, send: Send, piece_bytes: int) -> None:
    """In pieces, so that no more of it than a piece lies in the connection while its reader takes its time."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    body = bytes(response.body)
    for start in range(0, max(len(body), 1), piece_bytes):
        end = start + piece_bytes
        await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT], abort_timeout_s: float) -> ResultT:
    """The result of `work`, cancelled and ClientGone raised as soon as the caller closes the connection.

    The whole body must have been received.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        ended, _ = await asyncio.wait((working, watching), timeout=abort_timeout_s)
        for task in ended:
            if not task.cancelled():
                task.exception()  # looked at: what an abort raises concerns nobody


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
