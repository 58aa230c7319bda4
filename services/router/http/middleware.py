"""Around every request: its id, the caller's key, one log line, and an answer for whatever error comes out."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moot.core.errors import MootError
from moot.logs import request_id_var
from moot.tracing import checked_traceparent, traceparent_var
from services.router.auth import ApiKeys
from services.router.http import errors

log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

OPEN_PATHS = frozenset({"/health", "/readyz", "/livez"})
"""Probes carry no key; every other path, known or not, needs one."""


class ClientGone(Exception):
    """The caller closed the connection: nobody is left to answer."""


class FrontMiddleware:
    """Sets `request_id` and `caller` in the request's state. `known_paths`: those that may stand in a log."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, known_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._known_paths = frozenset(known_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        offered = headers.get("x-request-id", "")
        request_id = offered if _REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex
        request_id_var.set(request_id)
        traceparent_var.set(checked_traceparent(headers.get("traceparent")))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        started = time.monotonic()
        try:
            state = scope.setdefault("state", {})
            state["request_id"] = request_id
            state["caller"] = "" if scope["path"] in OPEN_PATHS else self._keys.caller(headers.get("authorization"))
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = 499
        except Exception as error:
            if not isinstance(error, MootError):
                log.exception("request failed")
            if not status:
                await errors.response(error)(scope, receive, send_with_id)
        finally:
            path = scope["path"] if scope["path"] in self._known_paths else "other"
            duration_ms = round(1000 * (time.monotonic() - started), 1)
            level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
            extra = {"method": scope["method"], "path": path, "status": status, "duration_ms": duration_ms}
            log.log(level, "request", extra=extra)
