"""Requests at and over the limits, through the whole path: refused by name or served, and the system lives on."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.integration.api import CHAT, COMPLETIONS, assert_refused, choice_of, events, post, url_of
from tests.integration.looping_model import greedy_ids
from tests.integration.shared_systems import Looping
from tests.waiting import GIVE_UP_S

PROMPT = list(b" ha ha")
GOOD = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}

BAD_VALUES: tuple[tuple[str, Any], ...] = (
    *(("top_k", value) for value in (-2, 0.01, 2**31, "5", True)),
    *(("top_p", value) for value in (0, 2, -0.1, "1")),
    *(("min_p", value) for value in (-0.1, 1.5)),
    *(("temperature", value) for value in (-1, -1e-9, 2.5, "hot", [1])),
    *(("seed", value) for value in (10**20, "100", 1.5)),
    *(("n", value) for value in (0, -1, 10**6, "2", 1.0)),
    *(("max_tokens", value) for value in (0, -1, 1.5, "9", 10**12)),
    *(("min_tokens", value) for value in (-1, 13, "1")),
    *(("stop", value) for value in (["x"] * 10_000, "", [""], [1], 5, "x" * 100_000)),
    *(("stop_token_ids", value) for value in ([-1], [259], [10**9], ["1"], list(range(258)) * 9)),
    *(("logit_bias", value) for value in ({"259": 1}, {"-1": 1}, {"1.0": 1}, {"a": 1}, {"1": 101}, {"1": "x"}, [1])),
    *(("allowed_token_ids", value) for value in ([], [259], [-1], "1")),
    *(("repetition_penalty", value) for value in (0, -1, 1e9)),
    *(("presence_penalty", value) for value in (3, -3)),
    *(("frequency_penalty", value) for value in (3, "1")),
    *(("logprobs", value) for value in (-1, 21, True)),
    *(("num_speculative_tokens", value) for value in (-1, 65, "8")),
    *(("drafters", value) for value in (["nobody"], "suffix", ["suffix", "suffix"])),
    *((name, {}) for name in ("guided_json", "structured_outputs", "tools", "best_off")),
    *(("prediction", value) for value in ("a text", 5, [])),
    *(("prompt", value) for value in ([259], [-1], [[]], [], "", [[1], "a"], [["a"]], {}, 7, [10**12])),
    *(("stream_options", value) for value in ({"include_usage": True}, [1])),
)


def assert_serves(looping: Looping) -> None:
    for router in looping.routers:
        assert choice_of(router, GOOD)["token_ids"] == greedy_ids(PROMPT, 12)


@pytest.mark.parametrize("field", sorted({name for name, _ in BAD_VALUES}))
def test_a_bad_parameter_is_refused_by_its_name(looping: Looping, field: str) -> None:
    """C19: 400 with `param` for every value that cannot be meant; the next good request works."""
    for name, value in BAD_VALUES:
        if name == field:
            assert_refused(post(looping.tree, GOOD | {name: value}), name)
    assert_serves(looping)


@pytest.mark.parametrize("value", [-1, 0, 259, 9_999_999])
def test_a_top_k_of_everything_is_no_limit(looping: Looping, value: int) -> None:
    """C19: the documented meaning: -1, 0 and whatever is larger than the vocabulary are no limit."""
    body = {**GOOD, "temperature": 1.2, "seed": 5}
    assert choice_of(looping.tree, body | {"top_k": value})["token_ids"] == choice_of(looping.tree, body)["token_ids"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_refused(looping: Looping, number: str) -> None:
    """C18, C19: what JSON cannot say, or no float can hold, is 400 in any field; the next good request works."""
    for field in ("temperature", "top_p", "seed", "presence_penalty"):
        raw = f'{{"prompt": "a", "max_tokens": 4, "{field}": {number}}}'
        assert post(looping.tree, raw).status_code == 400
        raw = f'{{"prompt": "a", "max_tokens": 4, "logit_bias": {{"97": {number}}}}}'
        assert post(looping.tree, raw).status_code == 400
    assert_serves(looping)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'"x"', b"[" * 100_000, b'{"a":' * 5000])
def test_a_body_that_is_no_object_is_refused(looping: Looping, raw: bytes) -> None:
    """C19: no JSON, other encodings, thousands of levels: 400, and the next good request works."""
    for path in (COMPLETIONS, CHAT):
        assert_refused(post(looping.tree, raw, path), None)
    assert_serves(looping)


def test_a_prompt_that_does_not_fit_is_refused_with_true_numbers(looping: Looping) -> None:
    """C22: 400 with the prompt's tokens and the context's; one token less is served to the context's end."""
    context = 40_960
    for prompt in ([97] * context, "a" * context, [97] * (context + 7)):
        error = assert_refused(post(looping.tree, {"prompt": prompt, "max_tokens": 1}), "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(len(prompt)) in error["message"]
        assert str(context) in error["message"]
    message = {"role": "user", "content": "a" * context}
    error = assert_refused(post(looping.tree, {"messages": [message]}, CHAT), "messages")
    assert error["code"] == "context_length_exceeded"
    assert_serves(looping)


def test_tokenizing_half_a_million_characters_does_not_block_health(looping: Looping) -> None:
    """C22: other requests and /health are answered while a text is tokenized; the text is then refused in full."""
    length = 500_000
    answers: list[httpx.Response] = []
    sender = threading.Thread(target=lambda: answers.append(post(looping.tree, {"prompt": "é " * (length // 3)})))
    sender.start()
    healthy = 0
    while sender.is_alive():
        assert httpx.get(url_of(looping.tree, "/health"), timeout=GIVE_UP_S).status_code == 200
        healthy += not answers
    sender.join()
    assert healthy > 0
    error = assert_refused(answers[0], "prompt")
    assert str(length // 3 * 3) in error["message"]
    assert_serves(looping)


def test_a_million_characters_are_refused_at_once(looping: Looping) -> None:
    """C22: what cannot fit whatever its tokens are is not tokenized at all."""
    for body, path in (
        ({"prompt": "é" * 1_000_000}, COMPLETIONS),
        ({"messages": [{"role": "user", "content": "é" * 1_000_000}]}, CHAT),
    ):
        error = assert_refused(post(looping.tree, body, path), "prompt" if path == COMPLETIONS else "messages")
        assert error["code"] == "context_length_exceeded"
    assert_refused(post(looping.tree, {"prompt": "x" * 9_000_000}), None, status=413)
    assert_serves(looping)


ODD_CHATS: tuple[tuple[Any, int], ...] = (
    ([], 400),
    (None, 400),
    ([{"role": "user", "content": ""}], 200),
    ([{"role": "user", "content": " "}], 200),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}], 200),
    ([{"role": "assistant", "content": ""}], 200),
    ([{"role": "user", "content": [{"type": "text", "text": ""}]}], 200),
    ([{"role": "user", "content": None}], 400),
    ([{"role": "user", "content": []}], 400),
    ([{"role": "user"}], 400),
    ([{}], 400),
    ([{"role": "wizard", "content": "a"}], 400),
    (["a"], 400),
)


@pytest.mark.parametrize(("messages", "status"), ODD_CHATS)
def test_an_odd_chat_generates_or_is_refused(looping: Looping, messages: Any, status: int) -> None:
    """C23: no messages, empty content, an empty turn in the middle: a text or 400, drafted = plain, and all live."""
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    response = post(looping.tree, body, CHAT)
    assert response.status_code == status, response.text
    if status == 200:
        drafted = choice_of(looping.tree, body | {"num_speculative_tokens": 8}, CHAT)
        plain = choice_of(looping.tree, body | {"num_speculative_tokens": 0}, CHAT)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["message"] == plain["message"]
        assert 0 < drafted["usage"]["completion_tokens"] <= 6
    assert_serves(looping)


@pytest.mark.parametrize(
    "prompt", [" ", "\n", "\u0000", "\ufffd", "a\u0301", "😀", [0], [258], [[97], [98, 99]], ["a", " "]]
)
def test_an_odd_prompt_generates(looping: Looping, prompt: Any) -> None:
    """C23: one blank, one control character, one special token, several prompts: each has its choice."""
    answers = [
        post(looping.tree, {"prompt": prompt, "max_tokens": 6, "temperature": 0, "num_speculative_tokens": length})
        for length in (0, 8)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    plain, drafted = (answer.json()["choices"] for answer in answers)
    assert drafted == plain
    assert len(drafted) == (2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    assert_serves(looping)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_the_usage_chunk_comes_when_asked_for(looping: Looping, path: str, n: int) -> None:
    """C15: one usage chunk, the last, with empty choices and the sum over all n; none unasked. However many chunks the
    tokens come in, the reason of a choice's end stands in its last one."""
    given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ha ha"}]}
    body = given | {"max_tokens": 10, "n": n, "temperature": 1, "seed": 3, "ignore_eos": True}
    for length in (0, 8):
        asked = body | {"num_speculative_tokens": length}
        silent = events(looping.tree, asked, path)
        assert not any(event.get("usage") for event in silent)
        assert all(event["choices"] for event in silent)
        assert sum(choice["finish_reason"] is not None for event in silent for choice in event["choices"]) == n
        *others, last = events(looping.tree, asked | {"stream_options": {"include_usage": True}}, path)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 10 * n
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 10 * n
        assert all(event["choices"] and event["usage"] is None for event in others)
        for index in range(n):
            mine = [choice for event in others for choice in event["choices"] if choice["index"] == index]
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        unasked = events(looping.tree, asked | {"stream_options": {"include_usage": False}}, path)
        assert not any(event.get("usage") for event in unasked)
