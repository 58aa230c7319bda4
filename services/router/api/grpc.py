"""RouterService: the gRPC twin of the HTTP API. The same code checks its requests and runs its choices."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import grpc.aio

from moot.core.errors import DeadlineExceeded, InvalidRequest
from moot.rpc import convert
from moot.runtime.logs import request_id_var
from moot.runtime.tracing import checked_traceparent, traceparent_var
from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from services.router.api.auth import ApiKeys
from services.router.api.choices import Choice, Front, plan_choices, run_choices
from services.router.api.error_responses import Attempt
from services.router.generation.request_types import GenerationChunk, GenerationMetrics

_NAMED_OTHERWISE = frozenset({"chat", "prompt", "prompt_token_ids", "logit_bias", "seed", "prediction"})

_NAMES: dict[str, dict[str, str]] = {
    "chat": {"messages": "chat.messages", "top_logprobs": "logprobs"},
    "prompt": {},
    "prompt_token_ids": {"prompt": "prompt_token_ids"},
}
"""Per input: what errors call a field of the HTTP API whose name here is another one."""


class RouterServicer(router_service_pb2_grpc.RouterServiceServicer):
    """`front` is shared with the HTTP app: one admission, one set of limits, one drain."""

    def __init__(self, front: Front, keys: ApiKeys) -> None:
        self._front = front
        self._keys = keys

    async def Generate(  # type: ignore[override]  # the generated base knows generators only, grpc.aio takes both
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Writes through the context, not by yielding: so a write has a bound, and a caller that goes ends it here."""
        started, front = time.monotonic(), self._front
        base_id = f"grpc-{uuid.uuid4().hex}"
        request_id_var.set(base_id)
        traceparent_var.set(checked_traceparent(_metadata(context, "traceparent")))
        caller = self._keys.caller(_metadata(context, "authorization"))
        with Attempt(front.metrics) as attempt, front.admission.enter(caller) as ticket:
            info = front.serving()
            kind, values = _body(request)
            _, choices = await plan_choices(
                front, values, info, ticket, base_id, chat=kind == "chat", names=_NAMES[kind]
            )
            attempt.is_generating = True
            async with aclosing(run_choices(front, choices, started)) as chunks:
                async for choice, chunk in chunks:
                    await self._write(context, _response(choice, chunk))

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], response: pb.GenerateResponse) -> None:
        """Write one message. Raises DeadlineExceeded when the caller takes nothing for too long."""
        try:
            async with asyncio.timeout(self._front.settings.slow_client_timeout_s):
                await context.write(response)
        except TimeoutError as error:
            self._front.metrics.slow_clients.labels("grpc").inc()
            raise DeadlineExceeded("the caller took nothing for too long") from error


def _body(request: pb.GenerateRequest) -> tuple[str, dict[str, Any]]:
    """The kind of input, and the body as one of the HTTP API. Raises InvalidRequest."""
    values, kind = _fields(request), request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("one of chat, prompt and prompt_token_ids is required", "input")
    # Chunks are written as they come, and nothing is collected for a whole answer.
    values["stream"] = True
    if kind == "chat":
        if "logprobs" in values:
            values["top_logprobs"], values["logprobs"] = values["logprobs"], True
        values["messages"] = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
    else:
        values["prompt"] = request.prompt if kind == "prompt" else list(request.prompt_token_ids.token_ids)
    return kind, values


def _fields(request: pb.GenerateRequest) -> dict[str, Any]:
    """The fields of a request under the names of the HTTP API, absent ones left out."""
    values: dict[str, Any] = {
        field.name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for field, value in request.ListFields()
        if field.name not in _NAMED_OTHERWISE
    }
    if request.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    if request.HasField("prediction"):
        values["prediction"] = {"type": "content", "content": request.prediction}
    if request.HasField("seed"):
        # The API's seeds are signed; equal modulo 2**64 is the same seed.
        values["seed"] = request.seed - (1 << 64) if request.seed >> 63 else request.seed
    return values


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> str | None:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == name), None)


def _response(choice: Choice, chunk: GenerationChunk) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=choice.request.request_id,
        choice_index=choice.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=[convert.logprobs_to_pb(entry) for entry in chunk.logprobs],
        finish_reason=convert.finish_to_pb(chunk.finish_reason),
        metrics=None if chunk.metrics is None else _metrics(chunk.metrics),
        durable=chunk.durable,
    )
    if isinstance(chunk.stop_reason, str):
        response.stop_string = chunk.stop_reason
    elif chunk.stop_reason is not None:
        response.stop_token_id = chunk.stop_reason
    return response


def _metrics(metrics: GenerationMetrics) -> pb.GenerationMetrics:
    values = asdict(metrics)
    drafters = values.pop("drafters").items()
    return pb.GenerationMetrics(
        **values, drafters=[pb.DrafterMetrics(drafter_id=drafter_id, **counts) for drafter_id, counts in drafters]
    )
