"""Bodies of the two endpoints, field by field: what is refused, under which name, and what the rest means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.errors import BodyTooLarge, ContextLengthExceeded, InvalidRequest, ModelNotFound
from moot.core.noise import choice_seed
from moot.core.types import ModelInfo
from services.router.api.bodies import parse_json_object
from services.router.api.requests import BodyReader, plan_requests
from services.router.api.settings import HttpSettings

SETTINGS = HttpSettings(served_model_names=("tiny", "org/tiny"), max_choices=16)
INFO = ModelInfo("tiny", "main", "", vocab_size=300, context_limit=100)
READER = BodyReader(SETTINGS, INFO, frozenset({"suffix", "ngram"}))
HELLO = [{"role": "user", "content": "hello"}]


def completion(**body: Any) -> Any:
    return READER.completion({"prompt": "hello"} | body)


def chat(**body: Any) -> Any:
    return READER.chat({"messages": HELLO} | body)


def refused(call: Any, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(**body)
    return caught.value


HUGE = 10**400
REFUSED_ON_BOTH = [
    ("temperature", [-1, -1e-9, 2.1, "1", True, float("inf"), HUGE, [1]]),
    ("top_p", [0, 2, -0.1, 1.01, "1", True]),
    ("top_k", [0.01, -2, 1.0, "5", True, HUGE]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("repetition_penalty", [0, -1, 1e-300, 101, "1"]),
    ("presence_penalty", [-2.1, 2.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1, HUGE]),
    ("seed", [10**20, -(2**63) - 1, 2**63, "100", 1.0, True]),
    ("n", [0, -1, 65, 10**6, 1.0, "1", True]),
    ("max_tokens", [0, -1, 2**31, 1.5, "5", True]),
    ("min_tokens", [-1, 1.0, 2**40]),
    ("stop", ["", ["a", ""], 5, [5], ["a"] * 17, ["x"] * 10_000, "y" * 257, "\ud800", {"a": 1}]),
    ("stop_token_ids", [[300], [-1], [1.0], ["1"], 5, [1] * 257, [True]]),
    ("allowed_token_ids", [[], [300], [-1], "1", [None], [1] * 301]),
    ("logit_bias", [{"300": 1}, {"-1": 1}, {"01": 1}, {" 1": 1}, {"x": 1}, {"1": 101}, {"1": "1"}, {"1": True}, [1],
                    {"1": HUGE}, {"²": 1}, {str(i): 0 for i in range(1025)}]),
    ("ignore_eos", [1, "true", []]),
    ("skip_special_tokens", [0]),
    ("include_stop_str_in_output", ["no"]),
    ("stream", [1, "true"]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("num_speculative_tokens", [-1, 65, 1.0, True]),
    ("drafters", ["suffix", ["nobody"], [1], [""], ["suffix", "suffix"]]),
    ("include_metrics", [1]),
    ("cache_salt", [5, "x" * 257]),
    ("user", [5, "x" * 513]),
    ("model", [5, "x" * 257]),
    ("response_format", [5]),
]  # fmt: skip
UNSUPPORTED = {
    "tools": [{"type": "function"}], "tool_choice": "auto", "functions": [{}], "function_call": "none",
    "grammar": "root",
    "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "x", "structured_outputs": {},
    "suffix": "x", "modalities": ["text"], "audio": {}, "store": True, "service_tier": "auto",
    "metadata": {}, "parallel_tool_calls": True, "reasoning_effort": "low", "prompt_logprobs": 1,
    "use_beam_search": True,
    "length_penalty": 1.0, "truncate_prompt_tokens": 5, "some_new_field": 1, "logits": [],
}  # fmt: skip


@pytest.mark.parametrize("call", [completion, chat])
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED_ON_BOTH for value in values], ids=repr
)
def test_a_bad_value_is_refused_by_name(call: Any, field: str, value: Any) -> None:
    """C18, C19: a value out of range or of another type is 400 with `param`, and is not quoted."""
    error = refused(call, **{field: value})
    assert error.param == field
    assert "y" * 50 not in str(error)


@pytest.mark.parametrize("call", [completion, chat])
@pytest.mark.parametrize("field", UNSUPPORTED)
def test_an_unsupported_or_unknown_field_is_refused_by_name(call: Any, field: str) -> None:
    """No field is ever ignored: known to others, or to nobody."""
    assert refused(call, **{field: UNSUPPORTED[field]}).param == field


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", ""),
        ("x" * 500, "x" * 64),
        ("\ud800é", "\\ud800\\xe9"),
        ("(text)", "(text)"),
        ("{0} {field}", "{0} {field}"),
        ("a.b[0]", "a.b[0]"),
    ],
)
def test_an_unknown_name_is_shown_in_ascii_and_cut(name: str, shown: str) -> None:
    """Whatever a caller calls a field, at the top and inside: an error of his, not of ours."""
    assert refused(completion, **{name: 1}).param == shown
    message = {"role": "user", "content": "a", name: 1}
    assert refused(chat, messages=[message]).param == f"messages[0].{shown}"


@pytest.mark.parametrize("call", [completion, chat])
def test_null_is_absent_for_every_known_field(call: Any) -> None:
    """Clients send null for what they leave out; a name nobody knows is refused even then."""
    fields = [field for field, _ in REFUSED_ON_BOTH]
    assert call(**dict.fromkeys([*fields, "tools", "store", "suffix"])).body.n == 1
    assert refused(call, some_new_field=None)


def test_values_that_ask_for_nothing_are_taken() -> None:
    """best_of 1, response_format text, store false, include_obfuscation false change nothing and are true."""
    body = completion(best_of=1, response_format={"type": "text"}, store=False)
    assert body.body.n == 1
    assert chat(stream=True, stream_options={"include_obfuscation": False}).body.include_usage is False
    assert chat(stream=True, stream_options={"include_usage": True}).body.include_usage is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"prediction": "a text"}, "prediction"),
        ({"prediction": {}}, "prediction.type"),
        ({"prediction": {"type": "ids", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [5]}}, "prediction.content[0]"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text"),
        ({"prediction": {"type": "content", "content": "a", "more": 1}}, "prediction.more"),
    ],
)
def test_nested_and_dependent_fields_are_named(body: dict[str, Any], param: str) -> None:
    """`param` leads to the field inside its object."""
    assert [refused(call, **body).param for call in (completion, chat)] == [param] * 2


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-6, 1e-5, 1e-3, 2.0, 2])
def test_every_temperature_of_the_range_is_kept(temperature: float) -> None:
    """C18: no rounding and no limit of its own at the border."""
    assert completion(temperature=temperature).params.temperature == temperature


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (0, 0), (1, 1), (299, 299), (300, 0), (9999999, 0)])
def test_top_k(given: int, meant: int) -> None:
    """C19: -1, 0 and the whole vocabulary or more mean no limit."""
    assert completion(top_k=given).params.top_k == meant


def test_sampling_fields_reach_the_parameters() -> None:
    """Every accepted field arrives in its place."""
    checked = completion(
        temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, logit_bias={"7": -100, "8": 2.5}, allowed_token_ids=[7, 8], min_tokens=2, max_tokens=9,
        stop_token_ids=[5], ignore_eos=True, logprobs=3, stop=["a", "b", "a"], n=2, seed=-5, num_speculative_tokens=0,
        drafters=[], include_metrics=True, cache_salt="s", user="u", skip_special_tokens=False, echo=False,
    )  # fmt: skip
    params, body = checked.params, checked.body
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 5, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, -0.3)
    assert (params.logit_bias, params.allowed_token_ids) == ({7: -100.0, 8: 2.5}, {7, 8})
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos, params.logprobs) == (2, {5}, True, 3)
    assert (checked.max_tokens, body.stop_strings, body.n, checked.seed) == (9, ("a", "b"), 2, -5)
    assert (body.num_speculative_tokens, body.drafters, body.include_metrics) == (0, [], True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (" ", (" ",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    """String, strings, ids, lists of ids."""
    assert completion(prompt=prompt).body.prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["a", ""], [[1], []], None, 5, {"a": 1}, [1, "a"], ["a", 1], ["a", [1]], [300], [-1], [True], [1.0],
     [[300]], [[[1]]], [None], "\ud83d", ["a"] * 257, [10**30]],
    ids=repr,
)  # fmt: skip
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    """C23: empty, mixed, out of the vocabulary, not Unicode."""
    assert refused(completion, prompt=prompt).param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hello", "messages"), ({}, "messages"), ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"), ([{"content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "assistant", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "\udc00"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a", "name": "bob"}], "messages[0].name"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "a", "more": 1}], "messages[0].more"),
        (HELLO * 2049, "messages"),
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused(messages: Any, param: str) -> None:
    """C23: the message and the field in it are named."""
    assert refused(chat, messages=messages).param == param


def test_messages_are_read() -> None:
    """Empty contents are contents; text parts are lines; developer is the newer word for system."""
    checked = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "", "refusal": None, "tool_calls": None},
            {"role": "user", "content": ""},
        ]
    )
    assert [tuple(message.values()) for message in checked.body.turns] == [
        ("system", "be brief"),
        ("user", "a\nb"),
        ("assistant", ""),
        ("user", ""),
    ]


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (chat, {"prompt": "a"}, "prompt"),
        (chat, {"echo": True}, "echo"),
        (chat, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"top_logprobs": 1}, "top_logprobs"),
        (completion, {"echo": True, "logprobs": 1}, "echo"),
        (completion, {"messages": HELLO}, "messages"),
        (completion, {"max_completion_tokens": 5}, "max_completion_tokens"),
        (completion, {"prompt": ["a", "b", "c"], "n": 6}, "n"),
    ],
)
def test_fields_of_one_api(call: Any, body: dict[str, Any], param: str) -> None:
    """Dependent fields, and those of the other endpoint."""
    assert refused(call, **body).param == param


def test_chat_logprobs() -> None:
    """logprobs alone: the token's own; top_logprobs: that many alternatives; neither: none."""
    assert chat().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4


def test_an_unknown_model_is_not_found() -> None:
    """404, not 400; no name at all means the first served."""
    with pytest.raises(ModelNotFound):
        completion(model="gpt-4")
    assert completion(model="org/tiny").model == "org/tiny"
    assert completion().model == "tiny"


def plan(checked: Any, *prompts: tuple[int, ...], caller: str = "") -> Any:
    return plan_requests(checked, prompts or ((1, 2),), INFO, "id", caller, "f", "prompt")


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "expected"),
    [
        ({}, 2, 16),
        ({"max_tokens": 50}, 2, 50),
        ({"max_tokens": 98}, 2, 98),
        ({"max_tokens": 10**6}, 2, 98),
        ({}, 99, 1),
    ],
)
def test_max_tokens_of_a_completion(body: dict[str, Any], prompt_tokens: int, expected: int) -> None:
    """16 when absent; never more than the context has room for."""
    (request,) = plan(completion(**body), tuple(range(prompt_tokens)))
    assert request.params.max_tokens == expected


def test_max_tokens_of_a_chat() -> None:
    """The rest of the context when absent; either name."""
    assert plan(chat())[0].params.max_tokens == 98
    assert plan(chat(max_tokens=5))[0].params.max_tokens == 5
    assert plan(chat(max_completion_tokens=5))[0].params.max_tokens == 5


@pytest.mark.parametrize("num_tokens", [100, 101, 5000])
def test_a_prompt_that_fills_the_context_is_refused_with_true_numbers(num_tokens: int) -> None:
    """C22: both numbers, the code, the field."""
    with pytest.raises(ContextLengthExceeded, match=rf"{num_tokens} tokens.* 100 tokens") as caught:
        plan(completion(), tuple([1] * num_tokens))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_min_tokens_that_cannot_be_reached_is_refused() -> None:
    """Cut by the context, max_tokens may become less than min_tokens."""
    error = refused(lambda: plan(completion(max_tokens=50, min_tokens=20), tuple([1] * 90)))
    assert error.param == "min_tokens"


def test_choices_are_numbered_prompt_major_each_with_its_seed() -> None:
    """Choice i of a request has choice_seed(seed, i), one prompt after the other."""
    requests = plan(completion(n=2, seed=7, prompt=[[1], [2]]), (1,), (2,))
    assert [request.prompt_token_ids for request in requests] == [(1,), (1,), (2,), (2,)]
    assert [request.params.seed for request in requests] == [choice_seed(7, index) for index in range(4)]
    assert [request.request_id for request in requests] == ["id-0", "id-1", "id-2", "id-3"]


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_every_signed_64_bit_seed_is_taken(seed: int) -> None:
    """And a request without one draws one, each time another."""
    assert completion(seed=seed).seed == seed
    assert completion().seed != completion().seed


def test_callers_do_not_share_a_prefix_cache() -> None:
    """The salt differs by caller and by cache_salt, and holds neither; without keys and salt there is none."""
    salts = [plan(completion(), caller=caller)[0].cache_salt for caller in ("", "k1", "k2")]
    salts.append(plan(completion(cache_salt="s"), caller="k1")[0].cache_salt)
    assert salts[0] == ""
    assert len(set(salts)) == 4
    assert "k1" not in "".join(salts)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"a"', b"null", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
        b'{"a": ' + b"1" * 5000 + b"}", b"\xff{}", b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"[" * 100_000,
        b'{"a":' * 100_000, b'{"a":' * 40 + b"1" + b"}" * 40, b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", b"{'a': 1}",
        b'{"a": 1} x',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """C19: NaN, deep nesting, huge integers, other encodings are 400, never an error of ours."""
    with pytest.raises(InvalidRequest):
        parse_json_object(body, 32, 1000)


def test_nesting_up_to_the_limit_is_read() -> None:
    """The limit is the number of levels of objects and lists."""
    text = json.dumps({"a": [[1]]}).encode()
    assert parse_json_object(text, 3, 1000) == {"a": [[1]]}
    with pytest.raises(InvalidRequest):
        parse_json_object(text, 2, 1000)


JSON = st.recursive(
    st.none() | st.text() | st.integers(), lambda some: st.lists(some) | st.dictionaries(st.text(), some), max_leaves=20
)


@given(JSON)
def test_texts_are_no_values(value: Any) -> None:
    """What is counted are the commas of JSON, not those of texts, whatever is escaped in them."""
    body = json.dumps({"a": value, "b": [",,," + '"' * 3 + "\\"] * 3}).encode()

    def commas(item: Any) -> int:
        children = list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []
        return max(len(children) - 1, 0) + sum(map(commas, children))

    count = commas(json.loads(body))
    assert parse_json_object(body, 1000, count)
    with pytest.raises(BodyTooLarge):
        parse_json_object(body, 1000, count - 1)


@pytest.mark.parametrize("item", [b"1", b"[]", b'""', b'"a":1', b'"\\",\\","'], ids=repr)
def test_a_body_of_many_values_is_refused_unparsed(item: bytes) -> None:
    """Megabytes of values would hold the event loop for seconds; the same size of text is nothing."""
    many = b",".join([item] * 1_000_000)
    for body in (b'{"prompt":[' + many + b"]}", b'{"logit_bias":{' + many + b"}}"):
        with pytest.raises(BodyTooLarge, match="250000 values"):
            parse_json_object(body, 32, 250_000)
    assert parse_json_object(json.dumps({"prompt": "a, b" * 1_000_000}).encode(), 32, 250_000)
