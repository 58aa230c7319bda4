"""A small HTTP client of Moot's own API, on the standard library: what the commands speak to a router with."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moot.core.errors import MootError
from moot.core.options import Options, option

ROUTER_PORT = 8000
"""Of a router's HTTP API, where none is given."""
DEFAULT_URL = f"http://127.0.0.1:{ROUTER_PORT}"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0
"""Longest silence of a stream: prefill of a long prompt on a slow machine included."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions(Options):
    """The server that a client talks to."""

    url: str = option(DEFAULT_URL, help="address of a router")
    api_key: str | None = option(None, help="sent as a bearer token")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Options):
    """The texts that a client asks for."""

    max_tokens: int = option(128, help="longest answer, in tokens", minimum=1)


class RequestFailed(MootError):
    """The server refused, broke off or could not be reached."""


@dataclass(slots=True)
class Piece:
    """One event of a stream. `at`: monotonic seconds of its arrival."""

    at: float
    text: str
    token_ids: list[int]


@dataclass(slots=True)
class Answer:
    """A streamed answer, filled while it arrives."""

    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in self.pieces for token_id in piece.token_ids]


class Client:
    """`base_url`: http://host:port, optionally with a path prefix. `api_key` is sent as a bearer token."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(base_url)
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:  # brackets that are no IPv6 address, a port that is none
            good = None
        if not good:
            raise RequestFailed(f"{base_url} is not an http:// or https:// address")
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def has_key(self) -> bool:
        return "Authorization" in self._headers

    def get(self, path: str) -> bytes:
        """Body of a 200 answer; raises RequestFailed."""
        connection, response = self._open("GET", path, None)
        try:
            return response.read()
        finally:
            connection.close()

    def models(self) -> list[str]:
        """The served names, at least one. Raises RequestFailed, also when what answers is no such server."""
        try:
            names = [str(model["id"]) for model in json.loads(self.get("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"what answers at {self._parts.geturl()} is not an OpenAI-compatible server") from error
        if not names:
            raise RequestFailed(f"the server at {self._parts.geturl()} serves no model")
        return names

    def stream_chat(self, body: dict[str, Any], answer: Answer) -> Iterator[Piece]:
        """Post a chat request and yield what arrives, which is also kept in `answer`. Closing the iterator cancels it.

        Raises RequestFailed with the server's own sentence, also for a stream that breaks off.
        """
        connection, response = self._open("POST", "/v1/chat/completions", body | {"stream": True})
        try:
            for event in _events(response):
                if "error" in event:
                    raise RequestFailed(str(event["error"].get("message", "the server reported an error")))
                answer.metrics = event.get("metrics") or answer.metrics
                for choice in event.get("choices", ()):
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    token_ids = choice.get("token_ids") or []
                    text = (choice.get("delta") or {}).get("content") or ""
                    if text or token_ids:
                        piece = Piece(time.monotonic(), text, token_ids)
                        answer.pieces.append(piece)
                        yield piece
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"the stream broke off: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(READ_TIMEOUT_S)
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path.rstrip("/") + path, payload, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(_refusal(response))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise RequestFailed(f"no answer from {self._parts.geturl()}: {error or type(error).__name__}") from error
        except RequestFailed:
            connection.close()
            raise
        return connection, response


def _refusal(response: http.client.HTTPResponse) -> str:
    raw = response.read()
    try:
        return f"{json.loads(raw)['error']['message']} (HTTP {response.status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with HTTP {response.status}"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON bodies of server-sent events, until `[DONE]`. Raises RequestFailed when the stream ends without it."""
    data: list[bytes] = []
    for raw in response:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            body = b"\n".join(data)
            data.clear()
            if body == b"[DONE]":
                return
            try:
                yield json.loads(body)
            except ValueError as error:
                raise RequestFailed("the stream holds something that is not JSON") from error
    raise RequestFailed("the stream ended before the answer did")
