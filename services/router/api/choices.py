"""The choices of one request: planned, generated concurrently, counted and timed.

`ChunkQueue`, bounded in bytes, holds chunks between the generations of one request and the writer of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from moot.core.errors import DeadlineExceeded, Draining, MootError, NoCapacity
from moot.core.types import FinishReason, ModelInfo, TokenLogprobs
from moot.runtime.metrics import Metrics
from moot.runtime.patience import Patience
from moot.runtime.tracing import Span, Tracing, traceparent_var
from services.router.api.admission import Admission, QueuePlace, Ticket
from services.router.api.bodies import ChatCompletionRequest, CompletionRequest
from services.router.api.requests import BodyReader, Checked, plan_requests
from services.router.api.settings import FrontState, HttpSettings
from services.router.api.text import IncrementalText, StopStrings
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
    place: QueuePlace
    """In the queue, until its first token."""
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

    def take(self, chunk: GenerationChunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        if self.keep_text:
            self.pieces.append(chunk.text)
            self.token_ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.metrics = chunk.finish_reason, chunk.stop_reason, chunk.metrics


async def plan_choices(
    front: Front,
    values: Mapping[str, Any],
    info: ModelInfo,
    ticket: Ticket,
    base_id: str,
    *,
    chat: bool,
    names: Mapping[str, str] = MappingProxyType({}),
    fingerprint: str = "",
) -> tuple[Checked[Any], list[Choice]]:
    """A body and its choices, which count as waiting from then on. `values`, `names`: as `bodies.read` takes them;
    `chat`: whether it is a conversation; `fingerprint`: of the body, for its record.

    Raises InvalidRequest with `param`, ModelNotFound, DeadlineExceeded, RateLimited, NoCapacity.
    """
    settings, tokenizer = front.settings, front.tokenizer
    reader = BodyReader(settings, info, front.state.drafter_ids(), names)
    checked: Checked[Any] = reader.chat(values) if chat else reader.completion(values)
    body = checked.body
    param = names.get("messages", "messages") if chat else names.get("prompt", "prompt")
    ticket.grow(body.n if chat else body.n * len(body.prompts))
    prompts, echoes = await encode_prompts(tokenizer, body, info.context_limit, param)
    prediction = await tokenizer.encode_prediction(
        body.predicted_text, context_limit=info.context_limit, param="prediction"
    )
    requests = plan_requests(checked, prompts, info, base_id, ticket.caller, fingerprint, param, prediction)
    most = sys.maxsize if checked.max_tokens is not None else settings.assumed_output_tokens
    amounts = [len(one.prompt_token_ids) + min(one.params.max_tokens, most) for one in requests]
    stops = StopStrings(body.stop_strings)
    choices = [
        Choice(
            index,
            request,
            IncrementalText.of(request, tokenizer.tokens, info.end_token_ids, stops),
            place,
            prompt_text=echoes[index // body.n],
            keep_text=not body.stream,
            return_token_ids=body.return_token_ids,
        )
        for index, (request, place) in enumerate(zip(requests, ticket.queue(amounts), strict=True))
    ]
    return checked, choices


async def encode_prompts(
    tokenizer: PromptTokenizer, body: ChatCompletionRequest | CompletionRequest, context_limit: int, param: str
) -> tuple[tuple[tuple[int, ...], ...], Sequence[str]]:
    """The ids of each prompt, and the text with which its choices begin."""
    if isinstance(body, ChatCompletionRequest):
        ids = await tokenizer.encode_chat(
            body.turns,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            context_limit=context_limit,
            param=param,
        )
        return (ids,), [""]
    # All prompts are texts or all are ids.
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    prompts = tuple(prompt for prompt in body.prompts if not isinstance(prompt, str))
    if texts:
        prompts = await tokenizer.encode(
            texts, add_special_tokens=body.add_special_tokens, context_limit=context_limit, param=param
        )
    if not body.echo:
        return prompts, [""] * len(prompts)
    return prompts, texts or [tokenizer.tokens.text(ids, body.skip_special_tokens) for ids in prompts]


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
    front: Front, choices: Sequence[Choice], started: float
) -> AsyncGenerator[tuple[Choice, GenerationChunk], None]:
    """Chunks of all choices as they come, each choice's in order. The first error ends all and is raised; Draining
    when the admission aborts. `started`: monotonic seconds at the request's arrival.

    At most `stream_buffer_bytes` wait for the consumer; then the generations wait. Closing aborts every generation
    and returns when they have let go, or after `abort_timeout_s`.
    """
    queue: _Queue = ChunkQueue(front.settings.stream_buffer_bytes)
    patience = Patience(front.settings.chunk_timeout_s)
    pumps = [asyncio.create_task(_pump(front, choice, queue, patience, started)) for choice in choices]
    pumps.append(asyncio.create_task(_interrupt(front.admission.aborting, choices[0], queue)))
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
        _, pending = await asyncio.wait(pumps, timeout=front.settings.abort_timeout_s)
        for pump in pending:
            pump.cancel()
        if pending:
            log.error("generations did not end after their abort", extra={"num_generations": len(pending)})
        patience.close()


async def _interrupt(aborting: asyncio.Event, choice: Choice, queue: _Queue) -> None:
    await aborting.wait()
    await queue.put((choice, Draining("the server shut down before the end")))


async def _pump(front: Front, choice: Choice, queue: _Queue, patience: Patience, started: float) -> None:
    timer = ChoiceTimer(front.metrics, started)
    finish, failure = FinishReason.ABORT, ""
    metrics: GenerationMetrics | None = None
    traced = front.tracing.begin("request", traceparent_var.get(), request_id=choice.request.request_id)
    if traced.traceparent:
        traceparent_var.set(traced.traceparent)
    try:
        chunks = cast("AsyncGenerator[GenerationChunk, None]", front.generator.generate(choice.request, choice.text))
        async with contextlib.aclosing(chunks):
            while True:
                chunk = await _next(chunks, patience)
                if chunk.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    raise MootError("the generation was ended by the server")
                choice.place.leave()
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
        choice.place.leave()
        timer.end(finish)
        _note_end(traced, finish, metrics)
        traced.end(failure)


_TRACED = ("num_prompt_tokens", "num_output_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens")


def _note_end(traced: Span, finish: FinishReason, metrics: GenerationMetrics | None) -> None:
    traced.note(finish_reason=finish.value)
    if metrics is not None:
        traced.note(**{name: getattr(metrics, name) for name in _TRACED})


async def _next(chunks: AsyncGenerator[GenerationChunk, None], patience: Patience) -> GenerationChunk:
    try:
        with patience.wait():
            return await anext(chunks)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no token for {patience.timeout_s:g} s") from error
    except StopAsyncIteration as error:
        raise RuntimeError("a generation ended without a finish reason") from error
