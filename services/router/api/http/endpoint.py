"""The endpoint of generations: one POST, from body to answer (admit, read, check, tokenize, generate, write).

`EventStream` writes server-sent events, and notices that the reader is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moot.core.errors import BodyTooLarge, DeadlineExceeded, InvalidRequest, MootError
from moot.core.types import ModelInfo
from moot.runtime.patience import Patience
from services.router.api import error_responses as errors
from services.router.api.admission import Ticket
from services.router.api.bodies import parse_json_object
from services.router.api.choices import Choice, Front, plan_choices, run_choices
from services.router.api.error_responses import Attempt, ClientGone
from services.router.api.http.replies import ChatReply, CompletionReply, Reply
from services.router.generation.request_types import GenerationChunk

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
        """Write nothing more, whether the stream was closed or not."""
        self._patience.close()

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            with self._patience.wait():
                await self._send_message(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


async def send_whole(response: Response, send: Send, piece_bytes: int) -> None:
    """Send a body in pieces, so that no more of it than a piece lies in the connection while its reader takes its
    time."""
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


log = logging.getLogger(__name__)


class GenerationEndpoint:
    """An ASGI app for POST /v1/completions, or with `chat` for POST /v1/chat/completions."""

    def __init__(self, front: Front, *, chat: bool) -> None:
        self._front = front
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request = Request(scope, receive)
        with Attempt(self._front.metrics) as attempt, self._front.admission.enter(request.state.caller) as ticket:
            info = self._front.serving()
            work = self._answer(await self._read(request), info, ticket, attempt, started, send)
            response = await unless_gone(receive, work, 2 * self._front.settings.abort_timeout_s)
            if response is not None:
                await send_whole(response, send, self._front.settings.stream_buffer_bytes)

    async def _read(self, request: Request) -> bytes:
        """The body, bounded in size and time. Raises BodyTooLarge, DeadlineExceeded, InvalidRequest, ClientGone."""
        limit = self._front.settings.max_body_bytes
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise InvalidRequest("the content type must be application/json", "content-type")
        announced = request.headers.get("content-length", "")
        body = bytearray()
        try:
            if announced.isdigit() and int(announced) > limit:
                raise BodyTooLarge(f"the request body must be at most {limit} bytes")
            async with asyncio.timeout(self._front.settings.body_timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise BodyTooLarge(f"the request body must be at most {limit} bytes")
        except TimeoutError as error:
            raise DeadlineExceeded("the request body did not arrive in time") from error
        except ClientDisconnect as error:
            raise ClientGone from error
        return bytes(body)

    async def _answer(
        self, body: bytes, info: ModelInfo, ticket: Ticket, attempt: Attempt, started: float, send: Send
    ) -> Response | None:
        """The response; None when it was streamed through `send`."""
        front, settings = self._front, self._front.settings
        base_id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        checked, choices = await plan_choices(
            front,
            parse_json_object(body, settings.max_json_depth, settings.max_json_values + info.context_limit),
            info,
            ticket,
            base_id,
            chat=self._chat,
            fingerprint=hashlib.sha256(body).hexdigest(),
        )
        del body  # megabytes, perhaps, for as long as the answer takes
        kind = ChatReply if self._chat else CompletionReply
        reply: Reply = kind(base_id, int(time.time()), checked, front.tokenizer.tokens, choices)
        attempt.is_generating = True
        async with aclosing(run_choices(front, choices, started)) as chunks:
            if checked.body.stream:
                stream = EventStream(send, settings.slow_client_timeout_s)
                try:
                    await self._stream(reply, chunks, stream)
                finally:
                    stream.release()
                return None
            durable = True
            async for _, chunk in chunks:
                durable = durable and chunk.durable
        answer = reply.wrap(reply.whole_kind, [reply.whole(choice) for choice in choices]) | reply.prompt()
        text = encode(answer | {"usage": reply.usage()} | reply.metrics())
        return Response(text, headers=_durability(durable), media_type="application/json")

    async def _stream(
        self, reply: Reply, chunks: AsyncGenerator[tuple[Choice, GenerationChunk], None], stream: EventStream
    ) -> None:
        with_usage, running = reply.checked.body.include_usage, len(reply.choices)
        opened: set[int] = set()
        try:
            async for choice, chunk in chunks:
                items = [reply.delta(choice, chunk)]
                if choice.index not in opened:
                    opened.add(choice.index)
                    items.insert(0, reply.opening(choice))
                running -= chunk.finish_reason is not None
                # With include_usage, OpenAI's chunks before the last carry an explicit null.
                usage = {"usage": None} if with_usage else {}
                bodies = [reply.wrap(reply.chunk_kind, [item]) | usage for item in items if item is not None]
                if bodies and not stream.started:
                    bodies[0] |= reply.prompt()
                if running == 0 and not with_usage:
                    bodies[-1] |= reply.metrics()
                if bodies:
                    await stream.send(map(event, bodies), _durability(chunk.durable))
            last = [DONE]
            if with_usage:
                last.insert(0, event(reply.wrap(reply.chunk_kind, []) | {"usage": reply.usage()} | reply.metrics()))
            await stream.send(last)
        except Exception as error:
            if not stream.started or isinstance(error, ClientGone):
                raise
            log.warning("stream ended by an error", extra={"kind": type(error).__name__})
            await stream.send([event(errors.describe(error).body)])
            if not isinstance(error, MootError):
                await stream.close()
                raise
        await stream.close()


def _durability(durable: bool) -> dict[str, str]:
    """The header that says that the request could not be resumed, as its record is not stored."""
    return {} if durable else {"x-moot-durable": "false"}
