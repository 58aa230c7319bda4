"""The HTTP API of a running router as tests of answers' shapes need it: whole bodies, every event, every header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.integration.processes import LOOPBACK, Process
from tests.waiting import GIVE_UP_S

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

Body = dict[str, Any]


def url_of(router: Process, path: str) -> str:
    return f"http://{LOOPBACK}:{router.port}{path}"


def post(router: Process, body: Body | bytes | str, path: str = COMPLETIONS) -> httpx.Response:
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    return httpx.post(url_of(router, path), content=content, headers=headers, timeout=GIVE_UP_S)


def whole(router: Process, body: Body, path: str = COMPLETIONS) -> Body:
    """The body of an answer that must be one."""
    response = post(router, {"return_token_ids": True, "include_metrics": True} | body, path)
    assert response.status_code == 200, response.text
    return dict(response.json())


def choice_of(router: Process, body: Body, path: str = COMPLETIONS) -> Body:
    """The only choice of it, with `usage` and `metrics` of the answer."""
    answer = whole(router, body, path)
    (choice,) = answer["choices"]
    return {**choice, "usage": answer["usage"], "metrics": answer["metrics"]["speculative_decoding"]}


def events(router: Process, body: Body, path: str = COMPLETIONS) -> list[Body]:
    """Every event of a streamed answer that must end as one, without `[DONE]`."""
    with streaming(router, body, path) as lines:
        datas = [line.removeprefix("data: ") for line in lines if line]
    assert datas[-1] == "[DONE]", datas
    parsed = [json.loads(data) for data in datas[:-1]]
    assert all("error" not in event for event in parsed), parsed
    return parsed


@contextmanager
def streaming(router: Process, body: Body, path: str = COMPLETIONS) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer as they come; leaving early closes the connection."""
    asked = json.dumps({"stream": True, "return_token_ids": True} | body)
    headers = {"content-type": "application/json"}
    with httpx.stream("POST", url_of(router, path), content=asked, headers=headers, timeout=GIVE_UP_S) as response:
        assert response.status_code == 200, response.read()
        yield response.iter_lines()


def text_of(parts: list[Body], index: int = 0) -> str:
    """A choice's text, joined from its events."""
    mine = [item for event in parts for item in event["choices"] if item["index"] == index]
    return "".join(item.get("text") or item.get("delta", {}).get("content") or "" for item in mine)


def ids_of(parts: list[Body], index: int = 0) -> list[int]:
    mine = [item for event in parts for item in event["choices"] if item["index"] == index]
    return [token_id for item in mine for token_id in item.get("token_ids", ())]


def assert_same(drafted: Body, plain: Body) -> None:
    """Two choices as `choice_of` returns them: text, ids, logprobs, ending and usage are equal."""
    for key in ("token_ids", "text", "finish_reason", "stop_reason", "logprobs"):
        assert drafted.get(key) == plain.get(key), key
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == len(plain["token_ids"])


def assert_refused(response: httpx.Response, param: str | None, status: int = 400) -> Body:
    """An error in OpenAI's shape that names `param`; returns it."""
    assert response.status_code == status, response.text
    error = dict(response.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error
