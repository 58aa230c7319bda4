"""A client of Moot's own API: what the commands speak to a router with."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx

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
class StreamedAnswer:
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
    """`base_url`: http://host:port, optionally with a path prefix. `api_key` is sent as a bearer token. `timeout_s`:
    longest silence of an answer.

    A connection for each request, to the address itself: proxies that the environment names are not asked. Authorities
    trusted under https:// are the system's, and those of SSL_CERT_FILE. May be used from any thread.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.url = base_url
        try:
            url = httpx.URL(base_url)
            good = url.scheme in ("http", "https") and url.host and (url.port is None or 0 < url.port < 65536)
        except httpx.InvalidURL:  # brackets that are no IPv6 address, a port that is none
            good = False
        if not good:
            raise RequestFailed(f"{base_url} is not an http:// or https:// address")
        self.has_key = bool(api_key)
        # As it is: lines of a stream are cut from its bytes.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.Client(
            base_url=url,
            headers=httpx.Headers(headers, encoding="latin-1"),
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            verify=ssl.create_default_context() if url.scheme == "https" else False,
            trust_env=False,
        )

    def get(self, path: str) -> bytes:
        """Body of a 200 answer; raises RequestFailed."""
        try:
            with closing(self._open("GET", path)) as response:
                return response.read()
        except httpx.HTTPError as error:
            raise RequestFailed(f"the answer broke off: {error or type(error).__name__}") from error

    def models(self) -> list[str]:
        """The served names, at least one. Raises RequestFailed, also when what answers is no such server."""
        try:
            names = [str(model["id"]) for model in json.loads(self.get("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"what answers at {self.url} is not an OpenAI-compatible server") from error
        if not names:
            raise RequestFailed(f"the server at {self.url} serves no model")
        return names

    def stream_chat(self, body: dict[str, Any], answer: StreamedAnswer) -> Iterator[Piece]:
        """Post a chat request and yield what arrives, which is also kept in `answer`. Closing the iterator cancels it.

        Raises RequestFailed with the server's own sentence, also for a stream that breaks off.
        """
        response = self._open("POST", "/v1/chat/completions", body | {"stream": True})
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
        except httpx.HTTPError as error:
            raise RequestFailed(f"the stream broke off: {error or type(error).__name__}") from error
        finally:
            response.close()

    def _open(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """A 200 answer whose body is still to be read, and which has to be closed."""
        try:
            response = self._http.send(self._http.build_request(method, path, json=body), stream=True)
            if response.status_code != 200:
                with closing(response):
                    raise RequestFailed(_refusal(response.status_code, response.read()))
        except httpx.HTTPError as error:
            raise RequestFailed(f"no answer from {self.url}: {error or type(error).__name__}") from error
        return response


def _refusal(status: int, raw: bytes) -> str:
    try:
        return f"{json.loads(raw)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with HTTP {status}"


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON bodies of server-sent events, until `[DONE]`. Raises RequestFailed when the stream ends without it."""
    data: list[bytes] = []
    for line in _lines(response):
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


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines of a body, ended by line feeds only: httpx's own lines end also where text has a U+2028 or U+0085, which
    JSON leaves as it is."""
    rest = b""
    for part in response.iter_raw():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
