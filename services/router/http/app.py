"""The HTTP application: routes and what they share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from moot.core.errors import Draining, ModelNotFound
from moot.metrics import Metrics
from moot.tracing import Tracing
from services.router.auth import ApiKeys
from services.router.http import errors
from services.router.http.endpoint import Front, GenerationEndpoint
from services.router.http.middleware import FrontMiddleware
from services.router.limits import Admission
from services.router.settings import FrontState, HttpSettings
from services.router.tokenization import PromptTokenizer
from services.router.types import Generator


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
    prompt_tokenizer = PromptTokenizer(
        tokenizer,
        timeout_s=settings.tokenize_timeout_s,
        num_threads=settings.tokenize_threads,
        max_prompt_bytes=settings.max_prompt_bytes,
    )
    front = Front(generator, prompt_tokenizer, settings, state, admission, metrics, tracing or Tracing())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        prompt_tokenizer.close()

    routes = _routes(front, alive)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(FrontMiddleware, keys=api_keys or ApiKeys(), known_paths=[route.path for route in routes])
        ],
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
        """Red only when requests cannot be served at all; a server that drains still serves those it has."""
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


def _probe(good: bool) -> Response:
    return PlainTextResponse("ok\n" if good else "no\n", 200 if good else 503)
