"""The official client against the HTTP front, over loopback."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from moot.core import errors
from services.router.api.auth import ApiKeys
from tests.services.router.api.http_fakes import HELLO, TOKENIZER, LiveServer, live_server
from tests.waiting import GIVE_UP_S

TEXT = "the target decides: 😀"
KEY = "a-key"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(TEXT, {"keys": ApiKeys.from_keys([KEY])}) as live:
        yield live


def client_of(server: LiveServer, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=GIVE_UP_S)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    """Two choices with logprobs."""
    asked = {"n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1}
    answer = client.chat.completions.create(model="tiny", messages=HELLO, **asked)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    content = answer.choices[1].logprobs.content
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes).decode() == TEXT
    assert answer.usage.completion_tokens == 2 * len(content)
    again = [*HELLO, answer.choices[0].message.model_dump(), *HELLO]
    assert client.chat.completions.create(model="tiny", messages=again).choices[0].message.content == TEXT


def test_chat_stream(client: openai.OpenAI) -> None:
    """Role first, then text; usage last and with no choices."""
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(TOKENIZER(TEXT)["input_ids"]) + 1


def test_completions(client: openai.OpenAI) -> None:
    """Whole and streamed, with logprobs, a stop and our own fields."""
    answer = client.completions.create(
        model="tiny", prompt="hi", max_tokens=50, logprobs=1, stop=":", extra_body={"top_k": 5, "include_metrics": True}
    )
    assert answer.choices[0].text == "the target decides"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_drafts"] == 2
    stream = client.completions.create(model="tiny", prompt="hi", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_models(client: openai.OpenAI) -> None:
    """List and retrieve."""
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_become_the_clients_exceptions(server: LiveServer, client: openai.OpenAI) -> None:
    """Status codes and bodies are those the client knows."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="hi", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError), client_of(server, "other") as stranger:
        stranger.models.list()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(errors.RateLimited("slow"), openai.RateLimitError), (errors.NoCapacity("full"), openai.InternalServerError)],
)
def test_errors_of_the_generation(error: Exception, kind: type[Exception]) -> None:
    """Before the first token as a status, after it as an event that the client raises."""
    for fail_at, expected in ((0, kind), (1, openai.APIError)):
        live = live_server(fail_at=fail_at, error=error)
        with live, client_of(live) as client, pytest.raises(expected):
            list(client.completions.create(model="tiny", prompt="hi", stream=True))
