"""The choices of one request: generated concurrently, counted and timed.

`ChunkQueue`, bounded in bytes, holds chunks between the generations of one request and the writer of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar, cast

from moot.core.errors import DeadlineExceeded, Draining, MootError, NoCapacity
from moot.core.types import FinishReason, ModelInfo, TokenLogprobs
from moot.runtime.metrics import Metrics
from moot.runtime.patience import Patience
from moot.runtime.tracing import Span, Tracing, traceparent_var
from services.router.api.admission import Admission, QueuePlace, Ticket
from services.router.api.requests import CommonBody
from services.router.api.settings import FrontState, HttpSettings
from services.router.api.text import IncrementalText
from services.router.api.tokenization import PromptTokenizer
from services.router.generation.request_types import GenerationChunk, GenerationMetrics, GenerationRequest, Generator


@dataclass(frozen=True, slots=True)
class Front:
    """The state that the endpoints share."""

    generator: Generator
    tokenizer: PromptTokenizer
    settings: HttpSettings
    state: FrontState
    admission: Admission
    metrics: Metrics
    tracing: Tracing = field(default_factory=Tracing)

    def serving(self) -> ModelInfo:
        """The model behind us. Raises what new requests are refused with now."""
        refusal = self.state.refusal() or self.state.shortage()
        if refusal is not None:
            raise refusal
        info = self.state.model_info()
        if info is None:
            raise NoCapacity("no verifier has been seen yet", self.settings.retry_after_s)
        return info


ItemT = TypeVar("ItemT")

_FRAME_BYTES = 256
"""Of an event around what it carries."""
_ID_BYTES, _LOGPROB_BYTES = 8, 64


def size_of(chunk: GenerationChunk) -> int:
    """Size of a chunk in an answer, in bytes, about."""
    entries = sum(1 + len(entry.top) for entry in chunk.logprobs)
    return _FRAME_BYTES + 4 * len(chunk.text) + _ID_BYTES * len(chunk.token_ids) + _LOGPROB_BYTES * entries


class ChunkQueue(Generic[ItemT]):
    """A bounded queue of chunks: several writers, one reader, one event loop. It holds at most `max_bytes` and the
    chunk that went over it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[ItemT, int]] = deque()
        self._num_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()

    async def put(self, item: ItemT, num_bytes: int = 0) -> None:
        """Put a chunk; waits while `max_bytes` are there."""
        while self._num_bytes >= self._max_bytes:
            self._room.clear()
            await self._room.wait()
        self._items.append((item, num_bytes))
        self._num_bytes += num_bytes
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> ItemT:
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item, num_bytes = self._items.popleft()
        self._num_bytes -= num_bytes
        if self._num_bytes < self._max_bytes:
            self._room.set()
        return item


log = logging.getLogger(__name__)
_Queue: TypeAlias = "ChunkQueue[tuple[Choice, GenerationChunk | BaseException]]"


@dataclass(slots=True)
class Choice:
    """One choice and what has come of it. `keep_text`: whether text and logprobs are collected for a whole answer."""

    index: int
    request: GenerationRequest
    text: IncrementalText
    prompt_text: str = ""
    keep_text: bool = True
    return_token_ids: bool = False
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: GenerationMetrics | None = None
    place: QueuePlace | None = None
    """In the queue, until its first token."""

    def leave_queue(self) -> None:
        if self.place is not None:
            self.place.leave()
            self.place = None

    def take(self, chunk: GenerationChunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        if self.keep_text:
            self.pieces.append(chunk.text)
            self.token_ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.metrics = chunk.finish_reason, chunk.stop_reason, chunk.metrics


def enqueue(ticket: Ticket, choices: Sequence[Choice], common: CommonBody, settings: HttpSettings) -> None:
    """Have the choices count as waiting. Raises RateLimited or NoCapacity."""
    most = None if common.max_tokens is not None else settings.assumed_output_tokens
    requests = [choice.request for choice in choices]
    outputs = [one.params.max_tokens if most is None else min(one.params.max_tokens, most) for one in requests]
    amounts = [len(one.prompt_token_ids) + output for one, output in zip(requests, outputs, strict=True)]
    for choice, place in zip(choices, ticket.queue(amounts), strict=True):
        choice.place = place


class ChoiceTimer:
    """The front's metrics of one choice. `started`: monotonic seconds at the request's arrival."""

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._last: float | None = None
        metrics.num_requests_running.inc()
        metrics.num_requests_waiting.inc()

    def tokens(self, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.num_requests_waiting.dec()
            self._metrics.time_to_first_token_seconds.observe(now - self._started)
        else:
            self._metrics.inter_token_latency_seconds.observe((now - self._last) / count, count)
        self._last = now

    def end(self, finish_reason: FinishReason) -> None:
        if self._last is None:
            self._metrics.num_requests_waiting.dec()
        self._metrics.num_requests_running.dec()
        self._metrics.requests.labels(finish_reason.value).inc()
        self._metrics.e2e_request_latency_seconds.observe(time.monotonic() - self._started)


async def run_choices(
    generator: Generator,
    choices: Sequence[Choice],
    settings: HttpSettings,
    metrics: Metrics,
    started: float,
    aborting: asyncio.Event | None = None,
    tracing: Tracing | None = None,
) -> AsyncGenerator[tuple[Choice, GenerationChunk], None]:
    """Chunks of all choices as they come, each choice's in order. The first error ends all and is raised; Draining
    when `aborting` is set.

    At most `stream_buffer_bytes` wait for the consumer; then the generations wait. Closing aborts every generation
    and returns when they have let go, or after `abort_timeout_s`.
    """
    queue: _Queue = ChunkQueue(settings.stream_buffer_bytes)
    patience = Patience(settings.chunk_timeout_s)
    pumps = [
        asyncio.create_task(
            _pump(generator, choice, queue, patience, ChoiceTimer(metrics, started), tracing or Tracing())
        )
        for choice in choices
    ]
    if aborting is not None:
        pumps.append(asyncio.create_task(_interrupt(aborting, choices[0], queue)))
    try:
        running = len(choices)
        while running:
            choice, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            choice.take(item)
            running -= item.finish_reason is not None
            yield choice, item
    finally:
        for pump in pumps:
            pump.cancel()
        _, pending = await asyncio.wait(pumps, timeout=settings.abort_timeout_s)
        for pump in pending:
            pump.cancel()
        if pending:
            log.error("generations did not end after their abort", extra={"num_generations": len(pending)})
        patience.close()


async def _interrupt(aborting: asyncio.Event, choice: Choice, queue: _Queue) -> None:
    await aborting.wait()
    await queue.put((choice, Draining("the server shut down before the end")))


async def _pump(
    generator: Generator,
    choice: Choice,
    queue: _Queue,
    patience: Patience,
    timer: ChoiceTimer,
    tracing: Tracing,
) -> None:
    finish, failure = FinishReason.ABORT, ""
    metrics: GenerationMetrics | None = None
    traced = tracing.begin("request", traceparent_var.get(), request_id=choice.request.request_id)
    if traced.traceparent:
        traceparent_var.set(traced.traceparent)
    try:
        chunks = cast("AsyncGenerator[GenerationChunk, None]", generator.generate(choice.request, choice.text))
        async with contextlib.aclosing(chunks):
            while True:
                chunk = await _next(chunks, patience)
                if chunk.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    raise MootError("the generation was ended by the server")
                choice.leave_queue()
                timer.tokens(len(chunk.token_ids))
                if chunk.finish_reason is not None:
                    finish, metrics = chunk.finish_reason, chunk.metrics
                await queue.put((choice, chunk), size_of(chunk))
                if chunk.finish_reason is not None:
                    return
    except Exception as error:  # noqa: BLE001 - raised again by the consumer of the queue
        finish, failure = FinishReason.ERROR, type(error).__name__
        await queue.put((choice, error))
    finally:
        choice.leave_queue()
        timer.end(finish)
        _note_end(traced, finish, metrics)
        traced.end(failure)


def _note_end(traced: Span, finish: FinishReason, metrics: GenerationMetrics | None) -> None:
    traced.note(finish_reason=finish.value)
    if metrics is not None:
        traced.note(
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_output_tokens=metrics.num_output_tokens,
            num_rounds=metrics.num_rounds,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens,
        )


async def _next(chunks: AsyncGenerator[GenerationChunk, None], patience: Patience) -> GenerationChunk:
    try:
        with patience.wait():
            return await anext(chunks)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no token for {patience.timeout_s:g} s") from error
    except StopAsyncIteration as error:
        raise RuntimeError("a generation ended without a finish reason") from error
