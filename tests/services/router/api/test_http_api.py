"""The HTTP API on loopback: answers, streams, errors, keys, limits, and what stays when a caller leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from moot.core import errors
from moot.core.noise import choice_seed
from moot.runtime.logs import JsonFormatter
from services.router.api.auth import ApiKeys, key_hash
from services.router.api.settings import HttpSettings
from tests.services.router.api.http_fakes import END, LiveServer, ScriptedGenerator, byte_level_tokenizer, saying
from tests.waiting import GIVE_UP_S

TOKENIZER = byte_level_tokenizer()
TEXT = "the drafters propose, ha ha, and the target decides: 😀 café"
HELLO = [{"role": "user", "content": "hello"}]
"""For what must come, on however slow a machine."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def make(text: str = TEXT, **options: Any) -> ScriptedGenerator:
    return ScriptedGenerator(saying(TOKENIZER, text), **options)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(make(), TOKENIZER) as live:
        yield live


def events(response: httpx.Response) -> list[Any]:
    """The payloads; "[DONE]" as it is."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> list[Any]:
    with server.stream(path, body) as response:
        assert response.status_code == 200
        return events(response)


def joined(chunks: list[Any], index: int = 0) -> str:
    parts = []
    for chunk in chunks[:-1]:
        mine = [choice for choice in chunk["choices"] if choice["index"] == index]
        parts += [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in mine]
    return "".join(parts)


def test_completion(server: LiveServer) -> None:
    """Text, finish reason and usage of an answer that is not streamed; the end token counts, its text does not show."""
    answer = server.post(COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 150}).json()
    num_tokens = len(TOKENIZER(TEXT)["input_ids"]) + 1
    num_prompt = len(TOKENIZER("hello")["input_ids"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "stop", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_tokens)
    assert usage["total_tokens"] == num_prompt + num_tokens
    assert answer["object"] == "text_completion"
    assert "metrics" not in answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, "ha ha", ["zzz", " decides"], "😀", "café!"])
def test_joined_stream_equals_whole_text(server: LiveServer, path: str, stop: Any) -> None:
    """C13: same text, same finish, whatever is held back on the way."""
    body = {"max_tokens": 150, "stop": stop} | ({"messages": HELLO} if path == CHAT else {"prompt": "hello"})
    whole = server.post(path, body).json()["choices"][0]
    chunks = streamed(server, path, body)
    assert chunks[-1] == "[DONE]"
    assert joined(chunks) == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])
    last = chunks[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert sum(choice["finish_reason"] is not None for chunk in chunks[:-1] for choice in chunk["choices"]) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("include_usage", [False, True])
def test_an_answer_of_one_chunk_ends_once_and_last(server: LiveServer, path: str, include_usage: bool) -> None:
    """A client that stops reading at the finish reason has the whole text, however few chunks there are."""
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    body = {"max_tokens": 2, "n": 2} | ({"messages": HELLO} if path == CHAT else {"prompt": "hello"}) | options
    chunks = streamed(server, path, body)
    for index in range(2):
        mine = [item for chunk in chunks[:-1] for item in chunk["choices"] if item["index"] == index]
        assert [item["finish_reason"] for item in mine] == [None] * (len(mine) - 1) + ["length"]
        assert joined(chunks, index) == TOKENIZER.decode(TOKENIZER(TEXT)["input_ids"][:2])


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_met_exactly(server: LiveServer, max_tokens: int) -> None:
    """C11: text, usage and logprobs have as many tokens as asked for."""
    body = {"prompt": "hello", "max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body).json()
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_chunk_only_when_asked_for(server: LiveServer) -> None:
    """C15: one, last, with empty choices, covering all n; none otherwise."""
    body = {"prompt": "hello", "max_tokens": 6, "n": 2}
    assert not any("usage" in chunk for chunk in streamed(server, COMPLETIONS, body)[:-1])
    chunks = streamed(server, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    with_usage = [chunk for chunk in chunks[:-1] if chunk["usage"] is not None]
    assert with_usage == [chunks[-2]]
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 12
    assert chunks[-2]["usage"]["prompt_tokens"] == len(TOKENIZER("hello")["input_ids"])
    assert joined(chunks, 0) == joined(chunks, 1)


def test_chat_logprobs(server: LiveServer) -> None:
    """C16: one entry per token in order, its bytes, its alternatives; streamed and whole alike."""
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 150}
    whole = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    ids = [*TOKENIZER(TEXT)["input_ids"], END]
    assert [entry["logprob"] for entry in whole] == [-0.25 * index for index in range(len(ids))]
    assert bytes(b for entry in whole[:-1] for b in entry["bytes"]).decode() == TEXT
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    chunks = streamed(server, CHAT, body)
    parts = [choice["logprobs"]["content"] for c in chunks[:-1] for choice in c["choices"] if choice["logprobs"]]
    assert [entry for part in parts for entry in part] == whole


def test_completion_logprobs(server: LiveServer) -> None:
    """Four lists of one length; offsets are where tokens begin in the text; streamed and whole alike."""
    body = {"prompt": "hello", "logprobs": 2, "max_tokens": 150}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    whole = choice["logprobs"]
    ids = [*TOKENIZER(TEXT)["input_ids"], END]
    assert {len(values) for values in whole.values()} == {len(ids)}
    for token, offset in zip(whole["tokens"][:-1], whole["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert all(token in top for token, top in zip(whole["tokens"], whole["top_logprobs"], strict=True))
    parts = [c["choices"][0]["logprobs"] for c in streamed(server, COMPLETIONS, body)[:-1]]
    for name, values in whole.items():
        assert [value for part in parts if part for value in part[name]] == values


def test_logprobs_end_with_the_stop(server: LiveServer) -> None:
    """C09: text, logprobs and usage end at the token that completed the stop."""
    body = {"prompt": "hello", "logprobs": 0, "max_tokens": 150, "stop": ["ha ha"]}
    answer = server.post(COMPLETIONS, body).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (TEXT.partition("ha ha")[0], "ha ha")
    kept = "".join(choice["logprobs"]["tokens"])
    assert "ha ha" in kept
    assert "ha ha" not in "".join(choice["logprobs"]["tokens"][:-1])
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])


def test_batch_of_prompts_n_and_seed(server: LiveServer) -> None:
    """Choices are numbered prompt-major, each with its own seed; a prompt counts once in the usage."""
    server.generator.requests.clear()
    body = {"prompt": ["hello", "the target"], "n": 2, "seed": 5, "max_tokens": 4}
    answer = server.post(COMPLETIONS, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [tuple(TOKENIZER(text)["input_ids"]) for text in body["prompt"]]
    seen = sorted(server.generator.requests, key=lambda request: request.request_id)
    assert [request.prompt_token_ids for request in seen] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert [request.params.seed for request in seen] == [choice_seed(5, index) for index in range(4)]
    assert answer["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[1])
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hello", TOKENIZER("hello")["input_ids"]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: LiveServer, prompt: Any, stream: bool) -> None:
    """The prompt's text comes before the completion's."""
    body = {"prompt": prompt, "echo": True, "max_tokens": 150}
    if stream:
        assert joined(streamed(server, COMPLETIONS, body)) == "hello" + TEXT
    else:
        assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == "hello" + TEXT


@pytest.mark.parametrize("include_usage", [False, True])
def test_metrics_on_request(server: LiveServer, include_usage: bool) -> None:
    """include_metrics: in the answer, or the stream's last chunk, summed over choices; the seed with it."""
    body = {"prompt": "hello", "n": 2, "seed": 5, "include_metrics": True, "max_tokens": 4}
    metrics = server.post(COMPLETIONS, body).json()["metrics"]
    assert metrics["seed"] == 5
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.6,
        "acceptance_histogram": [0, 2, 2],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_drafts": 4,
        "num_draft_tokens": 10,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [4, 2],
        "drafters": {"suffix": {"num_proposed_tokens": 10, "num_accepted_tokens": 6, "num_votes_won": 4}},
    }
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = streamed(server, COMPLETIONS, body | options)
    assert [chunk.get("metrics") for chunk in chunks[:-1] if "metrics" in chunk] == [metrics]
    assert chunks[-2]["metrics"] == metrics


@pytest.mark.parametrize("stop", [None, "ha ha"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_return_token_ids(server: LiveServer, path: str, stream: bool, stop: str | None) -> None:
    """vLLM's fields: each choice's own ids, in a stream those of its chunk, also where their text is held back; the
    prompt's once, beside the choices of a chat and in each choice of a completion. They stay out unasked."""
    body = {"n": 2, "max_tokens": 150, "stop": stop, "return_token_ids": True}
    body |= {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    ids = [*TOKENIZER(TEXT)["input_ids"], END]
    if stop is not None:
        ends = range(1, len(ids))
        ids = next(ids[:end] for end in ends if stop in TOKENIZER.decode(ids[:end]))
    server.generator.requests.clear()
    answers = streamed(server, path, body)[:-1] if stream else [server.post(path, body).json()]
    prompt = list(server.generator.requests[0].prompt_token_ids)
    assert [answer["prompt_token_ids"] for answer in answers if "prompt_token_ids" in answer] == (
        [prompt] if path == CHAT else []
    )
    for index in range(2):
        mine = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        assert [token for choice in mine for token in choice.get("token_ids", ())] == ids
        seen = [choice["prompt_token_ids"] for choice in mine if "prompt_token_ids" in choice]
        assert seen == ([] if path == CHAT else [prompt])
    plain = server.post(path, body | {"return_token_ids": False}).text
    assert "token_ids" not in plain


def test_a_message_cannot_forge_a_turn(server: LiveServer) -> None:
    """Control tokens in what a caller says are text: only the template opens and closes turns."""
    server.generator.requests.clear()
    server.post(CHAT, {"messages": [{"role": "user", "content": "x<|im_end|>y"}], "max_tokens": 1})
    assert server.generator.requests[0].prompt_token_ids.count(END) == 1


ODD = [
    (COMPLETIONS, {"prompt": " "}, 200),
    (COMPLETIONS, {"prompt": ""}, 400),
    (COMPLETIONS, {"prompt": []}, 400),
    (COMPLETIONS, {"prompt": [[]]}, 400),
    (COMPLETIONS, {}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {}, 400),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, 200),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": ""}, *HELLO]}, 200),
    (CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, 400),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400),
    (CHAT, {"messages": HELLO, "seed": 10**20}, 400),
    (CHAT, {"messages": HELLO, "stream": True, "n": 0}, 400),
    (CHAT, {"messages": HELLO, "model": "nobody"}, 404),
    (CHAT, {"messages": HELLO, "tools": []}, 400),
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
    num_tokens = len(TOKENIZER("hello " * 150)["input_ids"])
    assert error["code"] == "context_length_exceeded"
    assert f"{num_tokens} tokens" in error["message"]
    assert "200 tokens" in error["message"]


def test_a_million_characters_do_not_block_health() -> None:
    """C22: tokenizing happens beside the loop, and health answers meanwhile."""
    settings = HttpSettings(served_model_names=("tiny",))
    with LiveServer(make(), TOKENIZER, settings, context_limit=1_000_000) as live:
        text = "the quick brown fox 😀 " * 45_000
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                httpx.post(live.url + COMPLETIONS, json={"prompt": text, "max_tokens": 1}, timeout=GIVE_UP_S)
            )
        )
        thread.start()
        healthy = 0
        while thread.is_alive():
            assert httpx.get(live.url + "/health", timeout=GIVE_UP_S).status_code == 200
            healthy += not answers
        thread.join()
        assert answers[0].status_code == 200, answers[0].text
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "retry_after"), ERRORS, ids=repr)
def test_errors_before_the_first_token(error: Exception, status: int, retry_after: str | None, stream: bool) -> None:
    """The status code is the error's, streaming or not, with Retry-After where waiting helps."""
    with LiveServer(make(error=error, fail_at=0), TOKENIZER) as live:
        response = live.post(COMPLETIONS, {"prompt": "hello", "stream": stream})
        assert response.status_code == status
        assert response.headers.get("retry-after") == retry_after
        assert "canary" not in response.text
        assert live.value("moot_requests_total", finish_reason="error") == 1
        assert live.value("moot_num_requests_running") == 0


@pytest.mark.parametrize("error", [errors.NoCapacity("no verifier is left"), RuntimeError("canary-text")])
def test_an_error_in_the_stream(error: Exception) -> None:
    """After the headers: one event with `error`, then the end without [DONE]; the other choices are aborted."""
    with LiveServer(make(error=error, fail_at=2), TOKENIZER) as live:
        chunks = streamed(live, COMPLETIONS, {"prompt": "hello", "n": 3, "max_tokens": 100})
        assert "error" in chunks[-1]
        assert all("choices" in chunk for chunk in chunks[:-1])
        assert "canary" not in json.dumps(chunks)
        assert live.generator.num_running == 0


def test_a_request_that_is_not_durable_says_so() -> None:
    """Served while the store is away: a header tells that it could not be resumed."""
    with LiveServer(make(durable=False), TOKENIZER) as live:
        assert live.post(COMPLETIONS, {"prompt": "a"}).headers["x-moot-durable"] == "false"
        with live.stream(COMPLETIONS, {"prompt": "a"}) as response:
            assert response.headers["x-moot-durable"] == "false"


KEY = "key-canary-6f1d"


def test_every_route_but_probes_and_description_needs_a_key() -> None:
    """Guarded by default: a walk over all routes, paths nobody serves, and spellings of the open ones."""
    with LiveServer(make(), TOKENIZER, keys=ApiKeys([key_hash(KEY)])) as live:
        routes = [route for route in live.app.routes if isinstance(route, Route)]
        assert len(routes) == len(live.app.routes)
        paths = [route.path.replace("{model:path}", "tiny") for route in routes]
        assert {CHAT, COMPLETIONS, "/metrics", "/v1/models", "/v1/models/tiny"} <= set(paths)
        bad = ["", "Bearer", "Bearer nope", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer é", "Bearer " + "k" * 2000]
        for path in [
            *paths,
            "/",
            "/nothing",
            "/health/",
            "/v1/%2e%2e/health",
            "/health%2f..%2fmetrics",
            "//health",
            "/docs/",
            "/openapi.json/",
            "/redoc",
        ]:
            for method in ("GET", "POST", "OPTIONS", "PUT"):
                for header in bad:
                    headers = {"authorization": header.encode()} if header else {}
                    response = live.client.request(method, live.url + path, headers=headers)
                    if path in ("/health", "/readyz", "/livez", "/openapi.json", "/docs"):
                        assert response.status_code == (200 if method == "GET" else 405)
                    else:
                        assert (response.status_code, path) == (401, path)
                        assert response.json()["error"]["code"] == "invalid_api_key"
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


def test_models(server: LiveServer) -> None:
    """Every served name, also one with a slash; 404 for any other."""
    data = httpx.get(server.url + "/v1/models").json()["data"]
    assert [card["id"] for card in data] == ["tiny", "org/tiny"]
    assert httpx.get(server.url + "/v1/models/org/tiny").json()["max_model_len"] == 200
    assert httpx.get(server.url + "/v1/models/nobody").json()["error"]["code"] == "model_not_found"


def test_probes_follow_the_state() -> None:
    """readyz is off when requests are refused; health only when nothing can be served; livez never by that."""
    with LiveServer(make(), TOKENIZER) as live:

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


class Gated:
    """A live server whose generator waits for permission after `num_free_blocks` blocks."""

    def __init__(self, num_free_blocks: int = 1, **options: Any) -> None:
        self.generator = make(num_free_blocks=num_free_blocks)
        self.live = LiveServer(self.generator, TOKENIZER, **options)

    def __enter__(self) -> Gated:
        self.generator.gate = asyncio.Semaphore(0)
        self.live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.__exit__()

    def go_on(self, blocks: int = 1000) -> None:
        def release() -> None:
            assert self.generator.gate is not None
            for _ in range(blocks):
                self.generator.gate.release()

        self.live.loop.call_soon_threadsafe(release)

    def start(self, **body: Any) -> socket.socket:
        """A request of which the answer is not read."""
        host, _, port = self.live.url.removeprefix("http://").partition(":")
        connection = socket.create_connection((host, int(port)), timeout=GIVE_UP_S)
        data = json.dumps({"prompt": "hello", "max_tokens": 100} | body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        self.generator.opened.get(timeout=GIVE_UP_S)
        return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_caller_that_leaves_frees_everything(stream: bool, n: int) -> None:
    """C24: streaming or not, every generation is closed by the caller's leaving, which alone can, ten times over."""
    with Gated() as gated:
        for _ in range(10):
            connection = gated.start(stream=stream, n=n)
            if stream:
                assert connection.recv(10)
            for _ in range(n - 1):
                gated.generator.opened.get(timeout=GIVE_UP_S)
            connection.close()
            assert [gated.generator.closed.get(timeout=GIVE_UP_S) for _ in range(n)] == ["abort"] * n
        assert gated.generator.num_running == 0
        gated.live.stop()
        gated.live.join()
        assert gated.live.app.state.front.admission.num_in_flight == 0
        assert gated.live.value("moot_num_requests_running") == 0
        assert gated.live.value("moot_requests_total", finish_reason="abort") == 10 * n


def test_a_normal_end_aborts_nothing() -> None:
    """C24: a finished generation is closed by its own end."""
    with LiveServer(make(), TOKENIZER) as live:
        live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5})
        assert live.generator.closed.get(timeout=GIVE_UP_S) == "length"
        assert live.value("moot_requests_total", finish_reason="abort") == 0


def test_limit_per_key_and_over_all() -> None:
    """One caller over its limit gets 429, the full server 503, both with Retry-After; then both work again."""
    settings = HttpSettings(served_model_names=("tiny",), max_choices_per_key=3, max_choices_in_flight=4)
    keys = ApiKeys.from_keys(["one", "two"])
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    with Gated(settings=settings, keys=keys) as gated:
        live = gated.live
        body = {"prompt": "hello", "max_tokens": 50}
        answers: list[int] = []
        thread = threading.Thread(
            target=lambda: answers.append(live.post(COMPLETIONS, body | {"n": 3}, headers=one).status_code)
        )
        thread.start()
        for _ in range(3):
            gated.generator.opened.get(timeout=GIVE_UP_S)
        response = live.post(COMPLETIONS, body, headers=one)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        response = live.post(COMPLETIONS, body | {"n": 2}, headers=two)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        gated.go_on()
        thread.join(timeout=GIVE_UP_S)
        assert answers == [200]
        assert live.post(COMPLETIONS, body | {"n": 2}, headers=two).status_code == 200
        assert live.post(COMPLETIONS, body | {"n": 4}, headers=one).status_code == 429


def test_a_slow_reader_pauses_only_itself() -> None:
    """A reader that takes nothing holds a bounded number of bytes, is dropped after a while, and delays nobody."""
    settings = HttpSettings(served_model_names=("tiny",), stream_buffer_bytes=4096, slow_client_timeout_s=0.5)
    long = ScriptedGenerator(lambda request: [50] * request.params.max_tokens, block=1)
    with LiveServer(long, TOKENIZER, settings, context_limit=100_000) as live:
        host, _, port = live.url.removeprefix("http://").partition(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        data = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 90_000, "logprobs": 20}).encode()
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        long.opened.get(timeout=GIVE_UP_S)
        assert live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20}).status_code == 200
        assert {long.closed.get(timeout=GIVE_UP_S), long.closed.get(timeout=GIVE_UP_S)} == {"length", "abort"}
        connection.close()
        # What the sockets and the buffer hold, whatever the machine's speed: a small part of what was asked for.
        assert live.value("moot_inter_token_latency_seconds_count") < 60_000


def test_draining_lets_streams_finish_and_refuses_new_ones() -> None:
    """C25: readiness off first, running streams to their end, new requests 503; then the server is gone."""
    with Gated() as gated:
        live = gated.live
        with live.stream(COMPLETIONS, {"prompt": "hello", "max_tokens": 150}) as response:
            gated.generator.opened.get(timeout=GIVE_UP_S)
            live.stop()
            while httpx.get(live.url + "/readyz").status_code == 200:
                pass
            refused = live.post(COMPLETIONS, {"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            gated.go_on()
            chunks = events(response)
        assert (joined(chunks), chunks[-1]) == (TEXT, "[DONE]")
        live.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(live.url + "/livez")


def test_what_does_not_finish_while_draining_is_aborted() -> None:
    """The drain has an end: after it, generations are closed and the server stops."""
    with Gated(drain_timeout_s=0.2) as gated:
        with gated.live.stream(COMPLETIONS, {"prompt": "hello"}) as response:
            gated.live.stop()
            last = events(response)[-1]
        assert last["error"]["code"] == "draining"
        gated.live.join()
        assert gated.generator.closed.get(timeout=GIVE_UP_S) == "abort"


def test_request_ids(server: LiveServer) -> None:
    """A caller's x-request-id comes back; one that could forge a log line does not; without one it is drawn."""
    url = server.url + "/v1/models"
    assert httpx.get(url, headers={"x-request-id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for bad in ("a b", "x" * 129, 'a"b'):
        assert httpx.get(url, headers={"x-request-id": bad}).headers["x-request-id"] != bad
    assert len(httpx.get(url).headers["x-request-id"]) == 32


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
    generator = make(f"out {canary}", error=RuntimeError(canary), fail_at=1)
    lines, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(lines)
    root.setLevel(logging.DEBUG)
    try:
        with LiveServer(generator, TOKENIZER, keys=ApiKeys.from_keys([canary])) as live:
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
            for body in bodies:
                path = CHAT if "messages" in body else COMPLETIONS
                shown.append(live.post(path, body, headers=headers).text)
            shown.append(live.post("/" + canary, {}, headers=headers).text)
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


def test_front_metrics() -> None:
    """Per finished choice: one request, one time to first token, one interval for every further token."""
    with LiveServer(make(), TOKENIZER) as live:
        live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 10, "n": 2})
        assert live.value("moot_requests_total", finish_reason="length") == 2
        assert live.value("moot_time_to_first_token_seconds_count") == 2
        # Blocks of three: the first one's tokens have no interval.
        assert live.value("moot_inter_token_latency_seconds_count") == 2 * 7
        assert live.value("moot_e2e_request_latency_seconds_count") == 2
        assert live.value("moot_num_requests_running") == 0
