"""Errors to status codes and bodies: the one place of the HTTP front where that is decided.

Requests that end before anything was generated, counted by the status that they are answered with.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import TracebackType

from starlette.exceptions import HTTPException
from starlette.responses import Response

from moot.core import errors
from moot.core.errors import NoCapacity, RateLimited
from moot.runtime.metrics import Metrics


class ClientGone(Exception):
    """The caller closed the connection: nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """`body`: {"error": {"message", "type", "param", "code"}}."""

    status: int
    body: dict[str, dict[str, str | None]]
    headers: dict[str, str]


def describe(error: BaseException) -> ErrorReply:
    """What a caller is told. The text of an error that is not ours is not shown: it may quote anything."""
    match error:
        case errors.BodyTooLarge():
            return _reply(413, error, "invalid_request_error", error.code or "body_too_large", error.param)
        case errors.InvalidRequest():
            return _reply(400, error, "invalid_request_error", error.code or "invalid_value", error.param)
        case errors.Unauthenticated():
            reply = _reply(401, error, "authentication_error", "invalid_api_key")
            return ErrorReply(reply.status, reply.body, {"www-authenticate": "Bearer"})
        case errors.ModelNotFound():
            return _reply(404, error, "not_found_error", "model_not_found", "model")
        case errors.RateLimited():
            return _retry(_reply(429, error, "rate_limit_error", "rate_limit_exceeded"), error.retry_after_s)
        case errors.Draining():
            return _retry(_reply(503, error, "service_unavailable_error", "draining"), error.retry_after_s)
        case errors.OutOfMemory():
            return _retry(_reply(503, error, "service_unavailable_error", "out_of_memory"), error.retry_after_s)
        case errors.NoCapacity():
            return _retry(_reply(503, error, "service_unavailable_error", "no_capacity"), error.retry_after_s)
        case errors.DeadlineExceeded():
            return _reply(504, error, "timeout_error", "deadline_exceeded")
        case errors.PeerError():
            return _retry(_reply(503, error, "service_unavailable_error", "peer_lost"), 1.0)
        case errors.LeaseHeld():
            return _retry(_reply(503, error, "service_unavailable_error", "store"), error.retry_after_s)
        case errors.StoreError():
            return _retry(_reply(503, error, "service_unavailable_error", "store"), 1.0)
        case errors.RequestPoisoned():
            return _reply(500, error, "server_error", "request_poisoned")
        case HTTPException(status_code=404):
            return _reply(404, "no such path", "not_found_error", "not_found")
        case HTTPException(status_code=405):
            reply = _reply(405, "method not allowed", "invalid_request_error", "method_not_allowed")
            return ErrorReply(405, reply.body, dict(error.headers or {}))
        case _:
            return _reply(500, "internal error", "server_error", "internal_error")


def response(error: BaseException) -> Response:
    reply = describe(error)
    return Response(json.dumps(reply.body), reply.status, reply.headers, media_type="application/json")


def _reply(status: int, message: object, kind: str, code: str, param: str | None = None) -> ErrorReply:
    return ErrorReply(status, {"error": {"message": str(message), "type": kind, "param": param, "code": code}}, {})


def _retry(reply: ErrorReply, retry_after_s: float) -> ErrorReply:
    return ErrorReply(reply.status, reply.body, {"retry-after": str(max(1, math.ceil(retry_after_s)))})


class Attempt:
    """A request from its arrival until it generates; from then on its choices are counted as they end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.is_generating = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A caller that goes away, and a task that is cancelled, were refused nothing.
        if isinstance(error, Exception) and not (self.is_generating or isinstance(error, ClientGone)):
            self._metrics.requests_refused.labels(str(describe(error).status)).inc()
            if isinstance(error, NoCapacity | RateLimited):
                self._metrics.requests_turned_away.labels(error.shortage).inc()
