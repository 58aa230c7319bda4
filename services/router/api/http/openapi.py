"""/openapi.json: every route of the HTTP API, in OpenAPI 3.1, made of the structs that check bodies.

It tells what the software takes, nothing of the model behind it or of its callers, so it needs no key.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from services.router.api.bodies import ChatCompletionRequest, CompletionRequest
from services.router.api.http.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorAnswer,
    ModelCard,
    ModelList,
    TextCompletion,
    TextCompletionChunk,
)

Json = dict[str, Any]

_SCHEMAS = (
    *(ChatCompletionRequest, ChatCompletion, ChatCompletionChunk),
    *(CompletionRequest, TextCompletion, TextCompletionChunk),
    *(ModelList, ModelCard, ErrorAnswer),
)
_NOT_READY = "Nobody can serve now, or the server is draining."
_REFUSALS = {
    "400": "A field is wrong, unknown or not supported (`param` names it), or the prompt does not fit the context.",
    "404": "No such model.",
    "413": "The body is too large, or holds too many values.",
    "429": "The caller has as many requests or queued tokens as one caller may.",
    "500": "The server failed.",
    "503": f"{_NOT_READY} Or it is full.",
    "504": "The body, or a token, did not come in time.",
}
_WAIT = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
_DURABLE = {
    "X-Moot-Durable": {
        "description": "`false`: the request could not be resumed, as its record is not stored.",
        "schema": {"const": "false"},
    }
}
_EVENTS = (
    "With `stream: true`: server-sent events, each `data: ` and a JSON object; the end is `data: [DONE]`. An error "
    "after the first event is an event with `error`, and the end without [DONE]."
)
_ABOUT = (
    "OpenAI's API, with fields of vLLM's and its own. null is the same as absent. A field that is unknown or not "
    "supported is refused by its name, never ignored. Every answer has `X-Request-Id`, the caller's own where it was "
    "sent."
)


def document(guarded: bool) -> Json:
    """The description. `guarded`: whether API keys are asked for."""
    schemas: Json = {}
    for kind in _SCHEMAS:
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {name: _tidy(part) for name, part in schema.pop("$defs", {}).items()}
        schemas[kind.__name__] = _tidy(schema)
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Moot", "version": version("moot"), "description": _ABOUT},
        "paths": _paths(),
        "components": {"schemas": dict(sorted(schemas.items()))},
    }
    if guarded:
        found["components"]["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"apiKey": []}]
        for methods in found["paths"].values():
            for operation in methods.values():
                if "security" not in operation:
                    operation["responses"]["401"] = _error("The API key is missing or not valid.")
    return found


def _tidy(schema: Json) -> Json:
    """A schema without the titles, in which pydantic says every name a second time; required fields first."""
    for field in (schema, *schema["properties"].values()):
        field.pop("title", None)
    required = schema.get("required", ())
    schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: item[0] not in required))
    return schema


def _paths() -> Json:
    text = {"text/plain": {"schema": {"enum": ["ok\n", "no\n"]}}}
    name = {"name": "model", "in": "path", "required": True, "description": "May hold slashes."}
    models = _get("The models served here.", "ModelList")
    one = _get("One of the models served here.", "ModelCard")
    one |= {"parameters": [name | {"schema": {"type": "string"}}]}
    one["responses"]["404"] = _error(_REFUSALS["404"])
    metrics = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/v1/chat/completions": _generation("Continue a conversation.", "ChatCompletion"),
        "/v1/completions": _generation("Continue prompts.", "Completion", "TextCompletion"),
        "/v1/models": {"get": models},
        "/v1/models/{model}": {"get": one},
        "/health": _open("Whether requests can be served at all; red only when they cannot.", text, _NOT_READY),
        "/readyz": _open("Whether new requests are taken.", text, _NOT_READY),
        "/livez": _open("Whether the process is alive.", text, "It is not."),
        "/metrics": {
            "get": {"summary": "Metrics, for Prometheus.", "responses": {"200": _answer("The metrics.", metrics)}}
        },
        "/openapi.json": _open("This description.", {"application/json": {"schema": {"type": "object"}}}),
        "/docs": _open("This description, for people.", {"text/html": {"schema": {"type": "string"}}}),
    }


def _generation(summary: str, kind: str, answer: str = "") -> Json:
    answer = answer or kind
    body = {"required": True, "content": _json(f"{kind}Request")}
    event = {"anyOf": [_ref(f"{answer}Chunk"), _ref("ErrorAnswer")]}
    events = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    good = _answer(_EVENTS, _json(answer) | {"text/event-stream": {"schema": events}}) | {"headers": _DURABLE}
    responses = {"200": good} | {status: _error(text) for status, text in _REFUSALS.items()}
    for status in ("429", "503"):
        responses[status]["headers"] = _WAIT
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _get(summary: str, schema: str) -> Json:
    return {"summary": summary, "responses": {"200": _answer(summary, _json(schema))}}


def _open(summary: str, content: Json, bad: str = "") -> Json:
    """A route that needs no key. `bad`: what 503 means there."""
    responses = {"200": _answer(summary, content)} | ({"503": _answer(bad, content)} if bad else {})
    return {"get": {"summary": summary, "security": [], "responses": responses}}


def _error(description: str) -> Json:
    return _answer(description, _json("ErrorAnswer"))


def _answer(description: str, content: Json) -> Json:
    return {"description": description, "content": content}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": _ref(schema)}}


def _ref(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}
