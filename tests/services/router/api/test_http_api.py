"""What the HTTP API answers on loopback: texts, streams, logprobs, usage, metrics, models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.services.router.api.http_fakes import (
    CHAT,
    COMPLETIONS,
    END,
    HELLO,
    IDS,
    TEXT,
    TOKENIZER,
    LiveServer,
    joined,
    live_server,
)
from tests.waiting import GIVE_UP_S

ASKS: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "hello"}}
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as live:
        yield live


def test_completion(server: LiveServer) -> None:
    """Text, finish reason and usage of an answer that is not streamed; the end token counts, its text does not show."""
    answer = server.post(COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 150}).json()
    num_prompt = len(TOKENIZER("hello")["input_ids"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "stop", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, len(IDS))
    assert usage["total_tokens"] == num_prompt + len(IDS)
    assert answer["object"] == "text_completion"
    assert "metrics" not in answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, "ha ha", ["zzz", " decides"], "😀", "café!"])
def test_joined_stream_equals_whole_text(server: LiveServer, path: str, stop: Any) -> None:
    """C13: same text, same finish, whatever is held back on the way."""
    body = {"max_tokens": 150, "stop": stop} | ASKS[path]
    whole = server.post(path, body).json()["choices"][0]
    chunks = server.streamed(path, body)
    assert chunks[-1] == "[DONE]"
    assert joined(chunks) == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])
    last = chunks[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert sum(choice["finish_reason"] is not None for chunk in chunks[:-1] for choice in chunk["choices"]) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{}, WITH_USAGE])
def test_an_answer_of_one_chunk_ends_once_and_last(server: LiveServer, path: str, options: dict[str, Any]) -> None:
    """A client that stops reading at the finish reason has the whole text, however few chunks there are."""
    chunks = server.streamed(path, {"max_tokens": 2, "n": 2} | ASKS[path] | options)
    for index in range(2):
        mine = [item for chunk in chunks[:-1] for item in chunk["choices"] if item["index"] == index]
        assert [item["finish_reason"] for item in mine] == [None] * (len(mine) - 1) + ["length"]
        assert joined(chunks, index) == TOKENIZER.decode(IDS[:2])


def test_max_tokens_is_met_exactly(server: LiveServer) -> None:
    """C11: text, usage and logprobs have as many tokens as asked for."""
    for max_tokens in range(1, 10):
        body = {"prompt": "hello", "max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True}
        answer = server.post(COMPLETIONS, body).json()
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == max_tokens
        assert choice["finish_reason"] == "length"


def test_usage_chunk_only_when_asked_for(server: LiveServer) -> None:
    """C15: one, last, with empty choices, covering all n; none otherwise."""
    body = {"prompt": "hello", "max_tokens": 6, "n": 2}
    assert not any("usage" in chunk for chunk in server.streamed(COMPLETIONS, body)[:-1])
    chunks = server.streamed(COMPLETIONS, body | WITH_USAGE)
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
    assert [entry["logprob"] for entry in whole] == [-0.25 * index for index in range(len(IDS))]
    assert bytes(b for entry in whole[:-1] for b in entry["bytes"]).decode() == TEXT
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    chunks = server.streamed(CHAT, body)
    parts = [choice["logprobs"]["content"] for c in chunks[:-1] for choice in c["choices"] if choice["logprobs"]]
    assert [entry for part in parts for entry in part] == whole


def test_completion_logprobs(server: LiveServer) -> None:
    """Four lists of one length; offsets are where tokens begin in the text; streamed and whole alike."""
    body = {"prompt": "hello", "logprobs": 2, "max_tokens": 150}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    whole = choice["logprobs"]
    assert {len(values) for values in whole.values()} == {len(IDS)}
    for token, offset in zip(whole["tokens"][:-1], whole["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert all(token in top for token, top in zip(whole["tokens"], whole["top_logprobs"], strict=True))
    parts = [c["choices"][0]["logprobs"] for c in server.streamed(COMPLETIONS, body)[:-1]]
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


def test_batch_of_prompts_and_n(server: LiveServer) -> None:
    """Choices are numbered prompt-major; a prompt counts once in the usage."""
    server.generator.requests.clear()
    body = {"prompt": ["hello", "the target"], "n": 2, "max_tokens": 4}
    answer = server.post(COMPLETIONS, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [tuple(TOKENIZER(text)["input_ids"]) for text in body["prompt"]]
    seen = sorted(server.generator.requests, key=lambda request: request.request_id)
    assert [request.prompt_token_ids for request in seen] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert answer["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[1])
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hello", TOKENIZER("hello")["input_ids"]])
def test_echo(server: LiveServer, prompt: Any) -> None:
    """The prompt's text comes before the completion's, streamed or not."""
    body = {"prompt": prompt, "echo": True, "max_tokens": 150}
    assert joined(server.streamed(COMPLETIONS, body)) == "hello" + TEXT
    assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == "hello" + TEXT


@pytest.mark.parametrize("options", [{}, WITH_USAGE])
def test_metrics_on_request(server: LiveServer, options: dict[str, Any]) -> None:
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
    chunks = server.streamed(COMPLETIONS, body | options)
    assert [chunk.get("metrics") for chunk in chunks[:-1] if "metrics" in chunk] == [metrics]
    assert chunks[-2]["metrics"] == metrics


@pytest.mark.parametrize("stop", [None, "ha ha"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_return_token_ids(server: LiveServer, path: str, stream: bool, stop: str | None) -> None:
    """vLLM's fields: each choice's own ids, in a stream those of its chunk, also where their text is held back; the
    prompt's once, beside the choices of a chat and in each choice of a completion. They stay out unasked."""
    body = {"n": 2, "max_tokens": 150, "stop": stop, "return_token_ids": True} | ASKS[path]
    ends = range(1, len(IDS) + 1)
    ids = IDS if stop is None else next(IDS[:end] for end in ends if stop in TOKENIZER.decode(IDS[:end]))
    server.generator.requests.clear()
    answers = server.streamed(path, body)[:-1] if stream else [server.post(path, body).json()]
    prompt = list(server.generator.requests[0].prompt_token_ids)
    assert [answer["prompt_token_ids"] for answer in answers if "prompt_token_ids" in answer] == (
        [prompt] if path == CHAT else []
    )
    for index in range(2):
        mine = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        assert [token for choice in mine for token in choice.get("token_ids", ())] == ids
        seen = [choice["prompt_token_ids"] for choice in mine if "prompt_token_ids" in choice]
        assert seen == ([] if path == CHAT else [prompt])
    assert "token_ids" not in server.post(path, body | {"return_token_ids": False}).text


def test_a_message_cannot_forge_a_turn(server: LiveServer) -> None:
    """Control tokens in what a caller says are text: only the template opens and closes turns."""
    server.generator.requests.clear()
    server.post(CHAT, {"messages": [{"role": "user", "content": "x<|im_end|>y"}], "max_tokens": 1})
    assert server.generator.requests[0].prompt_token_ids.count(END) == 1


def test_models(server: LiveServer) -> None:
    """Every served name, also one with a slash; 404 for any other."""
    data = httpx.get(server.url + "/v1/models").json()["data"]
    assert [card["id"] for card in data] == ["tiny", "org/tiny"]
    assert httpx.get(server.url + "/v1/models/org/tiny").json()["max_model_len"] == 200
    assert httpx.get(server.url + "/v1/models/nobody").json()["error"]["code"] == "model_not_found"


def test_request_ids(server: LiveServer) -> None:
    """A caller's x-request-id comes back; one that could forge a log line does not; without one it is drawn."""
    url = server.url + "/v1/models"
    assert httpx.get(url, headers={"x-request-id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for bad in ("a b", "x" * 129, 'a"b'):
        assert httpx.get(url, headers={"x-request-id": bad}).headers["x-request-id"] != bad
    assert len(httpx.get(url).headers["x-request-id"]) == 32


def test_front_metrics() -> None:
    """Per finished choice: one request, one time to first token, one interval for every further token. C24: a finished
    generation is closed by its own end, and no abort."""
    with live_server() as live:
        live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 10, "n": 2})
        assert [live.generator.closed.get(timeout=GIVE_UP_S) for _ in range(2)] == ["length"] * 2
        assert live.value("moot_requests_total", finish_reason="length") == 2
        assert live.value("moot_requests_total", finish_reason="abort") == 0
        assert live.value("moot_time_to_first_token_seconds_count") == 2
        # Blocks of three: the first one's tokens have no interval.
        assert live.value("moot_inter_token_latency_seconds_count") == 2 * 7
        assert live.value("moot_e2e_request_latency_seconds_count") == 2
        assert live.value("moot_num_requests_running") == 0
