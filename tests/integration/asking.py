"""Requests against a running router, each on a thread of its own: read while they run, given up at any moment."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import socket
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.integration.processes import LOOPBACK
from tests.waiting import GIVE_UP_S, until


@dataclass(slots=True)
class Reply:
    """What came, as it comes. `error`: of an error status, or of the event that ended the stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """One entry per token, if asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False
    """`[DONE]` was seen, or the whole body."""
    broken: str | None = None
    """How the connection failed, if it did."""
    seconds: float = 0.0

    @property
    def drafting(self) -> dict[str, Any]:
        """The counts of its rounds."""
        return dict(self.metrics["speculative_decoding"])

    @property
    def proposed(self) -> dict[str, int]:
        """Tokens proposed for this request, by drafter."""
        return {name: counts["num_proposed_tokens"] for name, counts in self.drafting["drafters"].items()}

    def assert_refused(self, status: int, *codes: str) -> None:
        """With one of these codes, and with the time to come again where that helps."""
        assert self.status == status, self
        assert self.error is not None, self
        assert self.error["code"] in codes, self.error
        assert status not in (429, 503) or 1 <= int(self.headers["retry-after"]) <= 60


class Ask:
    """A request that has been sent. `chat`: by /v1/chat/completions, else /v1/completions. `key`: shown, if any."""

    def __init__(
        self, port: int, body: dict[str, Any], *, stream: bool = True, chat: bool = False, key: str = ""
    ) -> None:
        self.reply = Reply()
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._body = {"stream": stream, "return_token_ids": True, "include_metrics": True} | body
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=GIVE_UP_S)
        self._connection.connect()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_tokens(self, count: int) -> None:
        """Until at least `count` tokens are here; fails when the answer ends before."""
        until(lambda: len(self.reply.token_ids) >= count or self.is_over, f"{count} tokens")
        assert len(self.reply.token_ids) >= count, f"ended early: {self.reply}"

    def gap_s(self, count: float = math.inf) -> float:
        """Median time between its next `count` pieces, or all that still come."""
        times: list[float] = []
        seen = len(self.reply.token_ids)
        while len(times) < count and not self.is_over:
            if (now := len(self.reply.token_ids)) > seen:
                seen = now
                times.append(time.monotonic())
            time.sleep(0.001)
        assert count == math.inf or len(times) == count, "the answer has ended"
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self, within_s: float = GIVE_UP_S) -> Reply:
        """The reply when all of it is here, whatever it is."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"no end within {within_s:g} s: {self.reply}"
        return self.reply

    def give_up(self) -> None:
        """The client is gone: the connection is closed without a word."""
        self._is_closed = True
        raw = self._connection.sock
        if raw is not None:
            with contextlib.suppress(OSError):  # the server may have been faster
                raw.shutdown(socket.SHUT_RDWR)
        self._thread.join(GIVE_UP_S)

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._connection.request("POST", self._path, json.dumps(self._body), self._headers)
            response = self._connection.getresponse()
            self.reply.headers = {name.lower(): value for name, value in response.getheaders()}
            self.reply.status = response.status
            if response.status == 200 and self._body["stream"]:
                self._read_stream(response)
            else:
                self._take(json.loads(response.read()))
                self.reply.is_complete = True
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # AttributeError: http.client finds its socket gone when `give_up` closed it under it.
            self.reply.broken = f"{type(error).__name__}: {error}"
        finally:
            self.reply.seconds = time.monotonic() - started
            self._connection.close()

    def _read_stream(self, response: http.client.HTTPResponse) -> None:
        for raw in response:
            line = raw.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.reply.is_complete = True
                return
            self._take(json.loads(data))

    def _take(self, body: dict[str, Any]) -> None:
        reply = self.reply
        if "error" in body:
            reply.error = body["error"]
            return
        reply.request_id = body["id"]
        reply.metrics = body.get("metrics") or reply.metrics
        reply.usage = body.get("usage") or reply.usage
        for choice in body["choices"]:
            message = choice.get("delta") or choice.get("message") or choice
            reply.text += message.get("content") or message.get("text") or ""
            reply.token_ids.extend(choice.get("token_ids") or ())
            reply.logprobs.extend(_entries(choice.get("logprobs") or {}))
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            reply.stop_reason = choice.get("stop_reason") or reply.stop_reason


def _entries(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a chat, or of a completion, which has a list of tokens, one of numbers and so on."""
    if "content" in logprobs:
        return list(logprobs["content"])
    return [dict(zip(logprobs, row, strict=True)) for row in zip(*logprobs.values(), strict=True)]


def complete(port: int, body: dict[str, Any], *, stream: bool = False, chat: bool = False) -> Reply:
    """A request that must succeed."""
    reply = Ask(port, body, stream=stream, chat=chat).result()
    assert reply.status == 200, reply
    assert reply.is_complete, reply
    assert reply.error is None, reply
    return reply


def plain(port: int, body: dict[str, Any], *, chat: bool = False) -> Reply:
    """The same request with drafting off: what every answer must be equal to."""
    return complete(port, body | {"num_speculative_tokens": 0}, chat=chat)


def assert_same(reply: Reply, expected: Reply) -> None:
    """Complete, without an error, and identical."""
    assert reply.status == 200, reply
    assert reply.error is None, reply
    assert reply.broken is None, reply
    assert reply.is_complete, reply
    assert reply.token_ids == expected.token_ids, (reply.token_ids, expected.token_ids)
    assert (reply.text, reply.logprobs) == (expected.text, expected.logprobs)
    assert (reply.finish_reason, reply.stop_reason) == (expected.finish_reason, expected.stop_reason)
