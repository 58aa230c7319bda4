"""Callers of the HTTP API: what is refused and how, keys, limits, and what stays when they leave or the router does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from moot.core import errors
from moot.runtime.logs import JsonFormatter
from services.router.api.auth import ApiKeys, key_hash
from services.router.api.settings import HttpSettings
from tests.services.router.api.http_fakes import (
    CHAT,
    COMPLETIONS,
    HELLO,
    TEXT,
    TOKENIZER,
    LiveServer,
    ScriptedGenerator,
    events,
    joined,
    live_server,
)
from tests.waiting import GIVE_UP_S


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as live:
        yield live


ODD = [
    (COMPLETIONS, {"prompt": " "}, 200),
    (COMPLETIONS, {"prompt": ""}, 400),
    (COMPLETIONS, {}, 400),
    (CHAT, {}, 400),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, 200),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": ""}, *HELLO]}, 200),
    (CHAT, {"messages": HELLO, "stream": True, "n": 0}, 400),
    (CHAT, {"messages": HELLO, "model": "nobody"}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), ODD, ids=repr)
def test_odd_requests_get_an_answer_and_harm_nobody(
    server: LiveServer, path: str, body: dict[str, Any], status: int
) -> None:
    """C19, C23: 400 with a message, or a text; and the next good request works."""
    response = server.post(path, body)
    assert response.status_code == status
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 2}).status_code == 200


def test_the_templates_own_words_reach_the_caller(server: LiveServer) -> None:
    """A template that refuses a conversation says why."""
    error = server.post(CHAT, {"messages": [{"role": "assistant", "content": "a"}]}).json()["error"]
    assert "an assistant cannot begin" in error["message"]
    assert error["param"] == "messages"


def test_bodies_that_are_refused_as_a_whole(server: LiveServer) -> None:
    """C19: NaN, no JSON, other content types: 400; too large: 413, announced or not."""
    url = server.url + COMPLETIONS
    assert httpx.post(url, content=b'{"prompt": "a", "temperature": NaN}').status_code == 400
    assert httpx.post(url, content=b"prompt=a").status_code == 400
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(url, content=b'{"prompt": "a"}', headers=form).json()["error"]["param"] == "content-type"
    limit = HttpSettings(served_model_names=("tiny",)).max_body_bytes
    large = b'{"prompt": "' + b"a" * limit + b'"}'
    assert httpx.post(url, content=large).status_code == 413

    def parts() -> Iterator[bytes]:
        for begin in range(0, len(large), 65536):
            yield large[begin : begin + 65536]

    assert httpx.post(url, content=parts()).status_code == 413


def test_a_prompt_too_long_is_refused_with_true_numbers(server: LiveServer) -> None:
    """C22: tokens of the prompt and of the context."""
    error = server.post(COMPLETIONS, {"prompt": "hello " * 150}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in (len(TOKENIZER("hello " * 150)["input_ids"]), 200):
        assert f"{number} tokens" in error["message"]


def test_many_characters_do_not_block_health() -> None:
    """C22: tokenizing happens beside the loop, and health answers meanwhile."""
    with live_server(server={"context_limit": 1_000_000}) as live, ThreadPoolExecutor() as pool:
        text = "the quick brown fox 😀 " * 9_000
        answer = pool.submit(live.post, COMPLETIONS, {"prompt": text, "max_tokens": 1})
        healthy = 0
        while not answer.done():
            assert httpx.get(live.url + "/health", timeout=GIVE_UP_S).status_code == 200
            healthy += not answer.done()
        assert answer.result().status_code == 200, answer.result().text
        assert healthy > 3
        refused = live.post(COMPLETIONS, {"prompt": "a" * 2_200_000}).json()["error"]
        assert "2200000 bytes" in refused["message"]


ERRORS = [
    (errors.NoCapacity("full", 2.5), 503, "3"),
    (errors.Draining("leaving"), 503, "1"),
    (errors.RateLimited("slow down", 7), 429, "7"),
    (errors.DeadlineExceeded("too late"), 504, None),
    (errors.PeerLost("gone"), 503, "1"),
    (errors.StoreUnavailable("down"), 503, "1"),
    (errors.RequestPoisoned("not finite"), 500, None),
    (errors.InvalidRequest("no", "drafters"), 400, None),
    (errors.Unauthenticated("who"), 401, None),
    (RuntimeError("canary-text"), 500, None),
]


def test_errors_before_the_first_token() -> None:
    """The status code is the error's, streaming or not, with Retry-After where waiting helps."""
    with live_server(fail_at=0) as live:
        for number, (error, status, retry_after) in enumerate(ERRORS):
            live.generator.error = error
            for stream in (False, True):
                response = live.post(COMPLETIONS, {"prompt": "hello", "stream": stream})
                assert response.status_code == status, error
                assert response.headers.get("retry-after") == retry_after, error
                assert "canary" not in response.text
                assert live.value("moot_requests_total", finish_reason="error") == 2 * number + 1 + stream
                assert live.value("moot_num_requests_running") == 0


@pytest.mark.parametrize("error", [errors.NoCapacity("no verifier is left"), RuntimeError("canary-text")])
def test_an_error_in_the_stream(error: Exception) -> None:
    """After the headers: one event with `error`, then the end without [DONE]; the other choices are aborted."""
    with live_server(error=error, fail_at=2) as live:
        chunks = live.streamed(COMPLETIONS, {"prompt": "hello", "n": 3, "max_tokens": 100})
        assert "error" in chunks[-1]
        assert all("choices" in chunk for chunk in chunks[:-1])
        assert "canary" not in json.dumps(chunks)
        assert live.generator.num_running == 0


def test_a_request_that_is_not_durable_says_so() -> None:
    """Served while the store is away: a header tells that it could not be resumed."""
    with live_server(durable=False) as live:
        assert live.post(COMPLETIONS, {"prompt": "a"}).headers["x-moot-durable"] == "false"
        with live.stream(COMPLETIONS, {"prompt": "a"}) as response:
            assert response.headers["x-moot-durable"] == "false"


KEY = "key-canary-6f1d"


def test_every_route_but_probes_and_description_needs_a_key() -> None:
    """Guarded by default: a walk over all routes, paths nobody serves, and spellings of the open ones, with a key that
    is none; and whatever else is no key."""
    with live_server(server={"keys": ApiKeys([key_hash(KEY)])}) as live:
        routes = [route for route in live.app.routes if isinstance(route, Route)]
        assert len(routes) == len(live.app.routes)
        paths = [route.path.replace("{model:path}", "tiny") for route in routes]
        assert {CHAT, COMPLETIONS, "/metrics", "/v1/models", "/v1/models/tiny"} <= set(paths)
        paths += ["/", "/nothing", "/health/", "/v1/%2e%2e/health", "/health%2f..%2fmetrics", "//health"]
        for path in [*paths, "/docs/", "/openapi.json/", "/redoc"]:
            for method in ("GET", "POST", "OPTIONS", "PUT"):
                response = live.client.request(method, live.url + path, headers={"authorization": f"Bearer {KEY}x"})
                if path in ("/health", "/readyz", "/livez", "/openapi.json", "/docs"):
                    assert response.status_code == (200 if method == "GET" else 405)
                else:
                    assert (response.status_code, path) == (401, path)
                    assert response.json()["error"]["code"] == "invalid_api_key"
        for bad in ["", "Bearer", "Bearer nope", f"Basic {KEY}", KEY, "Bearer é", "Bearer " + "k" * 2000]:
            assert live.post(COMPLETIONS, {}, headers={"authorization": bad.encode()}).status_code == 401, bad
        assert live.post(COMPLETIONS, {}).status_code == 401
        good = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(live.url + "/v1/models", headers=good).status_code == 200
        assert httpx.get(live.url + "/metrics", headers=good).status_code == 200
        assert httpx.get(live.url + "/nothing", headers=good).json()["error"]["code"] == "not_found"
        assert httpx.get(live.url + CHAT, headers=good).status_code == 405
        assert live.post(COMPLETIONS, {"prompt": "a"}, headers=good).status_code == 200


def test_no_origin_may_call_from_a_browser(server: LiveServer) -> None:
    """CORS is off: no such header in any answer."""
    response = httpx.get(server.url + "/v1/models", headers={"origin": "http://evil.example"})
    assert not any(name.startswith("access-control") for name in response.headers)


def test_probes_follow_the_state() -> None:
    """readyz is off when requests are refused; health only when nothing can be served; livez never by that."""
    with live_server() as live:

        def probe() -> list[int]:
            return [httpx.get(f"{live.url}/{name}").status_code for name in ("health", "readyz", "livez")]

        assert probe() == [200, 200, 200]
        live.state.refused_with = errors.Draining("leaving", 4)
        assert probe() == [200, 503, 200]
        response = live.post(COMPLETIONS, {"prompt": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "4")
        live.state.refused_with = errors.NoCapacity("no verifier is left")
        assert probe() == [503, 503, 200]
        live.state.refused_with, info, live.state.info = None, live.state.info, None
        assert probe() == [503, 503, 200]
        assert live.post(COMPLETIONS, {"prompt": "a"}).status_code == 503
        live.state.info = info
        assert probe() == [200, 200, 200]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_caller_that_leaves_frees_everything(stream: bool, n: int) -> None:
    """C24: streaming or not, every generation is closed by the caller's leaving, which alone can, ten times over."""
    with live_server(num_free_blocks=1) as live:
        for _ in range(10):
            connection = live.connect(COMPLETIONS, {"prompt": "hello", "stream": stream, "n": n})
            for _ in range(n):
                live.generator.opened.get(timeout=GIVE_UP_S)
            if stream:
                assert connection.recv(10)
            connection.close()
            assert [live.generator.closed.get(timeout=GIVE_UP_S) for _ in range(n)] == ["abort"] * n
        assert live.generator.num_running == 0
        live.stop()
        live.join()
        assert live.app.state.front.admission.num_in_flight == 0
        assert live.value("moot_num_requests_running") == 0
        assert live.value("moot_requests_total", finish_reason="abort") == 10 * n


def test_limit_per_key_and_over_all() -> None:
    """One caller over its limit gets 429, the full server 503, both with Retry-After; then both work again."""
    settings = HttpSettings(served_model_names=("tiny",), max_choices_per_key=3, max_choices_in_flight=4)
    options = {"settings": settings, "keys": ApiKeys.from_keys(["one", "two"])}
    with live_server(num_free_blocks=1, server=options) as live, ThreadPoolExecutor() as pool:

        def ask(key: str, n: int) -> tuple[int, str | None]:
            body = {"prompt": "hello", "max_tokens": 50, "n": n}
            response = live.post(COMPLETIONS, body, headers={"authorization": f"Bearer {key}"})
            return response.status_code, response.headers.get("retry-after")

        answer = pool.submit(ask, "one", 3)
        for _ in range(3):
            live.generator.opened.get(timeout=GIVE_UP_S)
        assert ask("one", 1) == (429, "1")
        assert ask("two", 2) == (503, "1")
        live.go_on()
        assert answer.result(GIVE_UP_S) == (200, None)
        assert ask("two", 2) == (200, None)
        assert ask("one", 4) == (429, "1")


def test_a_slow_reader_pauses_only_itself() -> None:
    """A reader that takes nothing holds a bounded number of bytes, is dropped after a while, and delays nobody."""
    settings = HttpSettings(served_model_names=("tiny",), stream_buffer_bytes=4096, slow_client_timeout_s=0.5)
    long = ScriptedGenerator(lambda request: [50] * request.params.max_tokens, block=1)
    with LiveServer(long, TOKENIZER, settings, context_limit=100_000) as live:
        asked = {"prompt": "hello", "stream": True, "max_tokens": 90_000, "logprobs": 20}
        with live.connect(COMPLETIONS, asked):
            long.opened.get(timeout=GIVE_UP_S)
            assert live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20}).status_code == 200
            assert {long.closed.get(timeout=GIVE_UP_S), long.closed.get(timeout=GIVE_UP_S)} == {"length", "abort"}
        # What the sockets and the buffer hold, whatever the machine's speed: a small part of what was asked for.
        assert live.value("moot_inter_token_latency_seconds_count") < 60_000


def test_draining_lets_streams_finish_and_refuses_new_ones() -> None:
    """C25: readiness off first, running streams to their end, new requests 503; then the server is gone."""
    with live_server(num_free_blocks=1) as live:
        with live.stream(COMPLETIONS, {"prompt": "hello", "max_tokens": 150}) as response:
            live.generator.opened.get(timeout=GIVE_UP_S)
            live.stop()
            while httpx.get(live.url + "/readyz").status_code == 200:
                pass
            refused = live.post(COMPLETIONS, {"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            live.go_on()
            chunks = events(response)
        assert (joined(chunks), chunks[-1]) == (TEXT, "[DONE]")
        live.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(live.url + "/livez")


def test_what_does_not_finish_while_draining_is_aborted() -> None:
    """The drain has an end: after it, generations are closed and the server stops."""
    with live_server(num_free_blocks=1, server={"drain_timeout_s": 0.2}) as live:
        with live.stream(COMPLETIONS, {"prompt": "hello"}) as response:
            live.stop()
            last = events(response)[-1]
        assert last["error"]["code"] == "draining"
        live.join()
        assert live.generator.closed.get(timeout=GIVE_UP_S) == "abort"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter("router"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_nothing_a_caller_says_reaches_logs_errors_or_metrics() -> None:
    """The canary: prompt, output, key, stop string and path appear in no log line, error body or metric."""
    canary = "canaryzq"
    keys = ApiKeys.from_keys([canary])
    lines, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(lines)
    root.setLevel(logging.DEBUG)
    try:
        with live_server(f"out {canary}", error=RuntimeError(canary), fail_at=1, server={"keys": keys}) as live:
            headers = {"authorization": f"Bearer {canary}"}
            shown = []
            bodies: list[dict[str, Any]] = [
                {"prompt": canary, "stop": canary, "user": canary},
                {"prompt": canary, "temperature": canary},
                {"prompt": canary * 500},
                {"prompt": [canary, 5]},
                {"prompt": canary, "model": canary},
                {"prompt": canary, "logit_bias": {canary: 1}},
                {"prompt": canary, "drafters": canary},
                {"messages": [{"role": canary, "content": canary}]},
            ]
            asked = [(CHAT if "messages" in body else COMPLETIONS, body) for body in bodies]
            for path, body in [*asked, ("/" + canary, {})]:
                shown.append(live.post(path, body, headers=headers).text)
            shown.append(live.post(COMPLETIONS, {}, headers={"authorization": f"Bearer {canary}2"}).text)
            shown.append(httpx.post(live.url + CHAT, content=canary, headers=headers).text)
            shown.append(live.metrics.exposition().decode())
    finally:
        root.removeHandler(lines)
        root.setLevel(level)
    mine = [line for line in lines.lines if json.loads(line)["logger"].startswith("services.router")]
    assert len(mine) >= 11
    assert all(json.loads(line)["request_id"] for line in mine)
    # The test's own client logs the addresses it calls.
    served = [line for line in lines.lines if not json.loads(line)["logger"].startswith(("httpx", "httpcore"))]
    for text in [*served, *shown]:
        assert canary not in text
