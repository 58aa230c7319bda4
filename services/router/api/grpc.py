"""RouterService: the gRPC twin of the HTTP API. The same code checks its requests and runs its choices."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from moot.core.errors import DeadlineExceeded, InvalidRequest
from moot.core.types import ModelInfo
from moot.rpc import convert
from moot.runtime.logs import request_id_var
from moot.runtime.tracing import checked_traceparent, traceparent_var
from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from services.router.api.admission import Ticket
from services.router.api.auth import ApiKeys
from services.router.api.choices import Choice, Front, enqueue, run_choices
from services.router.api.error_responses import Attempt
from services.router.api.requests import CommonBody, parse_chat, parse_completion, plan_requests
from services.router.api.text import IncrementalText, StopStrings
from services.router.generation.request_types import GenerationChunk, GenerationMetrics, GenerationRequest

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
            requests, common = await self._plan(request, info, ticket, caller, base_id)
            choices = self._choices(requests, common, info)
            enqueue(ticket, choices, common, front.settings)
            attempt.is_generating = True
            aborting = front.admission.aborting
            running = run_choices(
                front.generator, choices, front.settings, front.metrics, started, aborting, front.tracing
            )
            async with aclosing(running) as chunks:
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

    async def _plan(
        self, request: pb.GenerateRequest, info: ModelInfo, ticket: Ticket, caller: str, base_id: str
    ) -> tuple[tuple[GenerationRequest, ...], CommonBody]:
        front, values = self._front, _fields(request)
        drafter_ids = front.state.drafter_ids()
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("one of chat, prompt and prompt_token_ids is required", "input")
        names = _NAMES[kind]
        prompts: tuple[tuple[int, ...], ...]
        if kind == "chat":
            if "logprobs" in values:
                values["top_logprobs"], values["logprobs"] = values["logprobs"], True
            values["messages"] = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
            chat = parse_chat(values, front.settings, info, drafter_ids, names)
            ticket.grow(chat.common.n)
            ids = await front.tokenizer.encode_chat(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                context_limit=info.context_limit,
                param=names["messages"],
            )
            common, prompts = chat.common, (ids,)
        else:
            ids_given = list(request.prompt_token_ids.token_ids)
            values["prompt"] = request.prompt if kind == "prompt" else ids_given
            completion = parse_completion(values, front.settings, info, drafter_ids, names)
            common = completion.common
            ticket.grow(common.n)
            if kind == "prompt":
                prompts = await front.tokenizer.encode(
                    [request.prompt],
                    add_special_tokens=completion.add_special_tokens,
                    context_limit=info.context_limit,
                    param="prompt",
                )
            else:
                prompts = (tuple(ids_given),)
        param = names["messages"] if kind == "chat" else kind
        prediction = await front.tokenizer.encode_prediction(
            common.prediction, context_limit=info.context_limit, param="prediction"
        )
        return plan_requests(common, prompts, info, base_id, caller, "", param, prediction), common

    def _choices(self, requests: tuple[GenerationRequest, ...], common: CommonBody, info: ModelInfo) -> list[Choice]:
        stops = StopStrings(common.stops)
        return [
            Choice(
                index,
                request,
                IncrementalText.of(request, self._front.tokenizer.tokens, info.end_token_ids, stops),
                keep_text=False,
            )
            for index, request in enumerate(requests)
        ]


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
    return pb.GenerationMetrics(
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_output_tokens=metrics.num_output_tokens,
        num_cached_tokens=metrics.num_cached_tokens,
        num_rounds=metrics.num_rounds,
        num_draft_tokens=metrics.num_draft_tokens,
        num_accepted_tokens=metrics.num_accepted_tokens,
        num_accepted_tokens_per_position=metrics.num_accepted_tokens_per_position,
        drafters=[
            pb.DrafterMetrics(
                drafter_id=drafter_id,
                num_proposed_tokens=counts.num_proposed_tokens,
                num_accepted_tokens=counts.num_accepted_tokens,
                num_votes_won=counts.num_votes_won,
            )
            for drafter_id, counts in metrics.drafters.items()
        ],
    )
