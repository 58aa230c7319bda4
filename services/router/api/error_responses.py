"""Error responses of the HTTP API: status, body and headers of each error.

An `Attempt` counts a request that ends before anything was generated, by the status that it is answered with.
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
    """The caller closed the connection: there is no reader for an answer."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """`body`: {"error": {"message", "type", "param", "code"}}."""

    status: int
    body: dict[str, dict[str, str | None]]
    headers: dict[str, str]


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""The body's `type`, which OpenAI's clients tell errors by."""


def describe(error: BaseException) -> ErrorReply:
    """The reply to a caller for an error. The text of an error that is not ours is not shown: it may quote anything."""
    row = errors.row_of(type(error))
    status, code, param = row.http_status, row.http_code, None
    message = "internal error" if code == errors.UNTOLD else str(error)
    headers: dict[str, str] = {}
    match error:
        case HTTPException(status_code=404):
            status, code, message = 404, "not_found", "no such path"
        case HTTPException(status_code=405):
            status, code, message = 405, "method_not_allowed", "method not allowed"
            headers |= error.headers or {}
        case errors.InvalidRequest():
            code, param = error.code or code, error.param
        case errors.ModelNotFound():
            param = "model"
        case errors.Unauthenticated():
            headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.MootError) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    body = {"error": {"message": message, "type": _TYPES[status], "param": param, "code": code}}
    return ErrorReply(status, body, headers)


def response(error: BaseException) -> Response:
    reply = describe(error)
    return Response(json.dumps(reply.body), reply.status, reply.headers, media_type="application/json")


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
