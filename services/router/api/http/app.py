"""The HTTP application: its routes, and what surrounds every request.

That is the request's id, the caller's key, one log line, and an answer for whatever error comes out.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moot.core.errors import Draining, ModelNotFound, MootError
from moot.runtime.logs import request_id_var
from moot.runtime.metrics import Metrics
from moot.runtime.tracing import Tracing, checked_traceparent, traceparent_var
from services.router.api import error_responses as errors
from services.router.api.admission import Admission
from services.router.api.auth import ApiKeys
from services.router.api.choices import Front
from services.router.api.error_responses import ClientGone
from services.router.api.http.docs_page import POLICY, page
from services.router.api.http.endpoint import GenerationEndpoint
from services.router.api.http.openapi import document
from services.router.api.settings import FrontState, HttpSettings
from services.router.api.tokenization import PromptTokenizer
from services.router.generation.request_types import Generator

log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

OPEN_PATHS = frozenset({"/health", "/readyz", "/livez", "/openapi.json", "/docs"})
"""Probes carry no key, nor does a browser that looks the API up; every other path, known or not, needs one."""


class FrontMiddleware:
    """The middleware around every request: sets `request_id` and `caller` in the request's state. `known_paths`: those
    that may stand in a log."""

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


def create_app(
    generator: Generator,
    tokenizer: Any,
    settings: HttpSettings,
    *,
    state: FrontState,
    metrics: Metrics,
    api_keys: ApiKeys | None = None,
    alive: Callable[[], bool] = lambda: True,
    tracing: Tracing | None = None,
) -> Starlette:
    """The app. `tokenizer`: from moot.tokenizer.load_tokenizer. `alive`: what /livez answers, cheap and without I/O.

    `app.state.front` holds what the endpoints share; its `admission` counts and drains (see `serve_http`). Raises
    ConfigError for a tokenizer whose text cannot be assembled token by token.
    """
    admission = Admission(settings, metrics, state.places)
    prompt_tokenizer = PromptTokenizer(tokenizer, settings)
    front = Front(generator, prompt_tokenizer, settings, state, admission, metrics, tracing or Tracing())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        prompt_tokenizer.close()

    keys = api_keys or ApiKeys()
    routes = [*_routes(front, alive), *_description(guarded=bool(keys))]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(FrontMiddleware, keys=keys, known_paths=[route.path for route in routes])],
        exception_handlers={HTTPException: _http_exception},
        lifespan=lifespan,
    )
    # A path with a slash too many is another path: it must not be redirected around the guard.
    app.router.redirect_slashes = False
    app.state.front = front
    return app


async def _http_exception(_: Request, error: Exception) -> Response:
    return errors.response(error)


def _routes(front: Front, alive: Callable[[], bool]) -> list[Route]:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        info = front.state.model_info()
        limit = info.context_limit if info else None
        return {"id": name, "object": "model", "created": created, "owned_by": "moot", "max_model_len": limit}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in front.settings.served_model_names]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in front.settings.served_model_names:
            raise ModelNotFound("no such model here")
        return JSONResponse(card(name))

    async def health(_: Request) -> Response:
        """Health: red only when requests cannot be served at all; a server that drains still serves those it has."""
        refusal = front.state.refusal()
        good = front.state.model_info() is not None and (refusal is None or isinstance(refusal, Draining))
        return _probe(good)

    async def readyz(_: Request) -> Response:
        good = front.state.refusal() is None and front.state.model_info() is not None
        return _probe(good and not front.admission.draining)

    async def livez(_: Request) -> Response:
        return _probe(alive())

    async def exposition(_: Request) -> Response:
        return Response(front.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    return [
        Route("/v1/chat/completions", GenerationEndpoint(front, chat=True), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(front, chat=False), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/health", health),
        Route("/readyz", readyz),
        Route("/livez", livez),
        Route("/metrics", exposition),
    ]


@functools.cache
def _described(guarded: bool) -> tuple[str, str]:
    """The description as JSON and as HTML, made once for all requests."""
    described = document(guarded)
    return json.dumps(described), page(described)


def _description(guarded: bool) -> list[Route]:
    """What the API is, for programs and for people."""
    text, html = _described(guarded)

    async def openapi(_: Request) -> Response:
        return Response(text, media_type="application/json")

    async def docs(_: Request) -> Response:
        return HTMLResponse(html, headers={"content-security-policy": POLICY})

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


def _probe(good: bool) -> Response:
    return PlainTextResponse("ok\n" if good else "no\n", 200 if good else 503)
