"""Many streamed requests at once from one thread: a plain HTTP client, because a comfortable one costs as much of the
shared cores as the router does."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 300.0
_RETRY_AFTER = re.compile(rb"\nretry-after: *([0-9]+)", re.IGNORECASE)


@dataclass(slots=True)
class Reply:
    """One answer. Times are monotonic seconds; `pieces`: (arrival, token ids) of each event that brought tokens."""

    name: str
    sent: float = 0.0
    status: int = 0
    pieces: list[tuple[float, list[int]]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_whole: bool = False
    retry_after_s: float = 0.0
    """Told to a caller that was refused."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for _, ids in self.pieces for token_id in ids)

    @property
    def first_token_s(self) -> float:
        return self.pieces[0][0] - self.sent

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between a piece and the one before it, shared among its tokens: one entry for each."""
        pairs = itertools.pairwise(self.pieces)
        return [(at - before) / len(ids) for (before, _), (at, ids) in pairs for _ in ids]


class RequestBroken(RuntimeError):
    """A measured request was refused or broke off."""


async def ask(url: str, body: Mapping[str, Any], *, name: str = "", leave_after: int = 0, chat: bool = True) -> Reply:
    """One streamed request. With `leave_after` the connection is closed once so many tokens are here.

    Whatever the server answers is in the reply; raises OSError and TimeoutError for the connection.
    """
    parts = urllib.parse.urlsplit(url)
    reply = Reply(name)
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**22)
        try:
            shared = {"stream": True, "return_token_ids": True, "include_metrics": True}
            content = json.dumps({**shared, **body}).encode()
            path = "/v1/chat/completions" if chat else "/v1/completions"
            head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            reply.sent = time.monotonic()
            writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
            status = await reader.readline()
            reply.status = int(status.split()[1])
            headers = await reader.readuntil(b"\r\n\r\n")
            if found := _RETRY_AFTER.search(headers):
                reply.retry_after_s = float(found[1])
            if b"text/event-stream" not in headers.lower():
                reply.error = (await reader.read()).decode(errors="replace")
                reply.is_whole = reply.status == 200
                return reply
            await _read_events(reader, reply, leave_after)
        finally:
            writer.close()
    return reply


async def _read_events(reader: asyncio.StreamReader, reply: Reply, leave_after: int) -> None:
    """Chunked transfer coding: a line with the size, the chunk, an empty line."""
    kept, count = b"", 0
    while size := int((await reader.readline()).strip() or b"0", 16):
        kept += await reader.readexactly(size)
        await reader.readexactly(2)
        now = time.monotonic()
        *events, kept = kept.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                reply.is_whole = True
                continue
            count += _take(reply, json.loads(data), now)
        if leave_after and count >= leave_after:
            return


def _take(reply: Reply, event: dict[str, Any], now: float) -> int:
    if "error" in event:
        reply.error = str(event["error"])
        return 0
    reply.metrics = event.get("metrics") or reply.metrics
    count = 0
    for choice in event.get("choices", ()):
        if ids := choice.get("token_ids"):
            reply.pieces.append((now, ids))
            count += len(ids)
    return count


async def closed_loop(
    url: str, bodies: Sequence[tuple[str, Mapping[str, Any]]], concurrency: int
) -> tuple[list[Reply], float]:
    """All `bodies` (name, body), `concurrency` at a time: who has its answer asks the next. With the seconds it took.

    Raises RequestBroken for an answer that is not whole.
    """
    waiting = list(reversed(bodies))
    replies: list[Reply] = []

    async def one() -> None:
        while waiting:
            name, body = waiting.pop()
            reply = await ask(url, body, name=name)
            if not reply.is_whole or reply.error or not reply.pieces:
                raise RequestBroken(f"{name}: HTTP {reply.status} {reply.error or 'broke off'}")
            replies.append(reply)

    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(one())
    return replies, time.monotonic() - begin
