"""Interceptors of gRPC servers: errors become gRPC's status codes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from moot.core.errors import InvalidRequest, ModelNotFound, MootError, row_of

_log = logging.getLogger("moot.rpc")

_ABORT_S = 1.0
"""For a peer that does not read to be told its status."""


def status_of(error: MootError) -> grpc.StatusCode:
    return grpc.StatusCode[row_of(type(error)).grpc_status]


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    status, text = grpc.StatusCode.INTERNAL, "internal error"
    metadata = []
    if isinstance(error, MootError):
        status, text = status_of(error), str(error)
        if isinstance(error, InvalidRequest) and error.param:
            metadata.append(("moot-param", error.param))
        if isinstance(error, ModelNotFound):
            metadata.append(("moot-param", "model"))
        if (seconds := error.retry_after_s) is not None:
            metadata.append(("retry-after", str(max(1, math.ceil(seconds)))))
    else:
        # The message of an unknown error may quote a prompt: it goes neither to the caller nor to the log.
        _log.error("unexpected %s in a handler", type(error).__name__, exc_info=error)
    # Its frames hold what the request held, and a peer that reads nothing does not read its status either.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_S):
            await context.abort(status, text, tuple(metadata))
    # gRPC keeps the status, and what was written, for as long as the connection lasts; nothing else is kept.
    raise asyncio.CancelledError


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: a MootError becomes its status, anything else INTERNAL without its text."""

    def __init__(self, admit: Callable[[grpc.aio.ServicerContext[Any, Any]], None] = lambda _: None) -> None:
        """`admit` raises a MootError for a caller that may not call. It is asked once a call."""
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.response_streaming:
            wrap = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            inner_stream = handler.stream_stream or handler.unary_stream

            async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
                try:
                    self._admit(context)
                    answers = inner_stream(request, context)
                    if inspect.isawaitable(answers):
                        await answers  # it writes through the context, as the health service's Watch does
                        return
                    async with aclosing(answers):
                        async for response in answers:
                            yield response
                except Exception as error:  # noqa: BLE001 - this is the border where every error ends
                    await _abort(context, error)

            return wrap(stream, handler.request_deserializer, handler.response_serializer)

        async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                self._admit(context)
                return await handler.unary_unary(request, context)
            except Exception as error:  # noqa: BLE001 - this is the border where every error ends
                await _abort(context, error)

        if handler.unary_unary is None:
            return handler  # a synchronous health servicer's Watch and the like pass through
        return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)
