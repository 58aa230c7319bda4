"""/openapi.json and /docs: valid, complete, as strict as the structs that check bodies, and true of real answers."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate
from pydantic import ValidationError

from moot.core.errors import InvalidRequest
from services.router.api.auth import ApiKeys
from services.router.api.bodies import Body, ChatCompletionRequest, CompletionRequest, read
from services.router.api.http.docs_page import page
from services.router.api.http.openapi import document
from services.router.api.settings import HttpSettings
from tests.services.router.api.http_fakes import CHAT, COMPLETIONS, HELLO, LiveServer, live_server
from tests.waiting import GIVE_UP_S

DOCUMENT = document(guarded=True)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
KINDS = (ChatCompletionRequest, CompletionRequest)
LEAST: dict[type[Body], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "a"},
}
CANARY = "canaryzq"


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    return SCHEMAS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema as a list of those with one type each."""
    schema = resolve(schema)
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return [one for part in several for one in alternatives(part)]
    if isinstance(schema.get("type"), list):
        return [schema | {"type": kind} for kind in schema["type"]]
    return [schema]


def validator(name: str, schemas: dict[str, Any] = SCHEMAS) -> OAS31Validator:
    return OAS31Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


def test_the_document_is_valid() -> None:
    """OpenAPI 3.1, with and without keys."""
    for guarded in (False, True):
        validate(document(guarded))
    assert "security" not in document(False)
    assert DOCUMENT["security"] == [{"apiKey": []}]
    assert DOCUMENT["components"]["securitySchemes"]["apiKey"] == {"type": "http", "scheme": "bearer"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described(kind: type[Body]) -> None:
    """The fields that the parser takes are those of the schema, each with a description, and there are no others."""
    todo, seen = [SCHEMAS[kind.__name__]], 0
    assert set(todo[0]["properties"]) == {*kind.model_fields, *kind.unsupported}
    while todo:
        schema = todo.pop()
        assert schema["additionalProperties"] is False
        for name, field in schema["properties"].items():
            assert field.get("description") or (name, "$ref" in field) == ("content", True), name
            seen += 1
            parts = alternatives(field)
            parts += [one for part in parts if "items" in part for one in alternatives(part["items"])]
            todo += [part for part in parts if "properties" in part]
    assert seen > 60


def drawn(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What the schema allows."""
    return st.one_of([_drawn(one) for one in alternatives(schema)])


def _drawn(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(low, schema["maximum"], exclude_min="exclusiveMinimum" in schema)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 20), 20))
        case "array":
            size = min(schema.get("maxItems", 3), 3)
            return st.lists(drawn(schema["items"]), min_size=schema.get("minItems", 0), max_size=size)
        case _:
            return _drawn_object(schema)


def _drawn_object(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if patterns := schema.get("patternProperties"):
        ((pattern, value),) = patterns.items()
        return st.dictionaries(st.from_regex(pattern.replace("$", r"\Z"), alphabet=string.digits), drawn(value))
    required = {name: drawn(schema["properties"][name]) for name in schema.get("required", ())}
    others = {name: drawn(field) for name, field in schema["properties"].items() if name not in required}
    return st.fixed_dictionaries(required, optional=others)


FIELDS = {kind: {name: drawn(field) for name, field in SCHEMAS[kind.__name__]["properties"].items()} for kind in KINDS}


@st.composite
def some_fields(draw: st.DrawFn, kind: type[Body]) -> dict[str, Any]:
    """A body of the schema with its required fields and a few others."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS[kind])), max_size=6, unique=True))
    required = SCHEMAS[kind.__name__]["required"]
    return {name: draw(FIELDS[kind][name]) for name in dict.fromkeys([*required, *names])}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_bodies_drawn_from_the_schema_are_accepted(kind: type[Body], data: st.DataObject) -> None:
    """Nothing that the description allows is refused by the struct; null is the same as absent."""
    body = data.draw(some_fields(kind))
    asked = read(kind, body, {})
    given_names = {name for name, value in body.items() if value is not None}
    assert asked.model_fields_set == given_names
    absent = read(kind, {name: body[name] for name in given_names}, {})
    assert absent == asked


WORDS = st.sampled_from(["", "7", "07", "user", "text", CANARY, CANARY * 60, "é"])
NAMES = WORDS | st.sampled_from(["type", "role", "content", "include_usage", "name"])
# Integral floats are integers to JSON Schema; to us they are none.
NUMBERS = st.integers(-2, 130) | st.integers(-(2**70), 2**70) | st.sampled_from([0.5, -0.5, 1e300 / 3])
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(NAMES, some, max_size=3),
    max_leaves=6,
)


VALIDATORS = {kind: validator(kind.__name__) for kind in KINDS}


def refusal_of(kind: type[Body], body: dict[str, Any]) -> InvalidRequest | None:
    try:
        read(kind, body, {})
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=400)
@given(st.data())
def test_schema_and_struct_agree_on_any_body(kind: type[Body], data: st.DataObject) -> None:
    """One of them refuses what the other refuses; the refusal names a field and quotes nothing that was sent."""
    body = data.draw(some_fields(kind))
    names = st.sampled_from([*SCHEMAS[kind.__name__]["properties"], "some_new_field"])
    body |= data.draw(st.dictionaries(names, ANY, max_size=2))
    error = refusal_of(kind, body)
    assert (error is None) == VALIDATORS[kind].is_valid(body)
    if error is not None:
        assert error.param is not None
        assert re.split(r"[.\[]", error.param)[0] in {*body, *SCHEMAS[kind.__name__]["required"]}
        assert "is not valid" not in str(error)
        # The name of an unknown field may be shown, values may not.
        assert CANARY not in str(error).replace(f"`{error.param}`", "")


def edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at the schema's bounds, and whether they are inside."""
    for one in alternatives(schema):
        match one.get("type"):
            case "integer" | "number" as kind if "const" not in one:
                step = 1 if kind == "integer" else 1e-3
                if "exclusiveMinimum" in one:
                    yield from ((one["exclusiveMinimum"], False), (one["exclusiveMinimum"] + step, True))
                else:
                    yield from ((one["minimum"], True), (one["minimum"] - step, False))
                yield from ((one["maximum"], True), (one["maximum"] + step, False))
            case "string" if "const" not in one and "enum" not in one:
                if low := one.get("minLength"):
                    yield from (("x" * low, True), ("x" * (low - 1), False))
                if high := one.get("maxLength"):
                    yield from (("x" * high, True), ("x" * (high + 1), False), ("é" * high, True))
            case "array" if "properties" not in resolve(one["items"]):
                attached = next(value for value, good in edges(one["items"]) if good)
                if low := one.get("minItems"):
                    yield from (([attached] * low, True), ([], False))
                if high := one.get("maxItems"):
                    yield from (([attached] * high, True), ([attached] * (high + 1), False))
                yield from (([attached, value], good) for value, good in edges(one["items"]))
            case "object" if "maxProperties" in one:
                high = one["maxProperties"]
                yield from (({str(i): 0 for i in range(high)}, True), ({str(i): 0 for i in range(high + 1)}, False))
                ((_, value),) = one["patternProperties"].items()
                yield from (({"5": value}, good) for value, good in edges(value))
                yield from (({key: 0}, good) for key, good in (("0", True), ("00", False), ("-1", False), ("", False)))


BOUNDED = [
    (kind, name) for kind in KINDS for name, field in SCHEMAS[kind.__name__]["properties"].items() if list(edges(field))
]


@pytest.mark.parametrize(("kind", "name"), BOUNDED)
def test_each_bound_is_enforced_at_its_edge(kind: type[Body], name: str) -> None:
    """The last value inside is taken, the first outside is refused by the field's name."""
    for value, good in edges(SCHEMAS[kind.__name__]["properties"][name]):
        body = LEAST[kind] | {name: value}
        if good:
            read(kind, body, {})
            continue
        with pytest.raises(InvalidRequest) as caught:
            read(kind, body, {})
        assert caught.value.param == name


def test_the_bounds_are_those_that_are_promised() -> None:
    """Written down once more, so that none is lost unseen."""
    properties = {name: field for kind in KINDS for name, field in SCHEMAS[kind.__name__]["properties"].items()}
    keys = ("minimum", "exclusiveMinimum", "maximum")
    for name, bounds in {
        "temperature": (0, None, 2), "top_p": (None, 0, 1), "min_p": (0, None, 1), "top_k": (-1, None, 2**31 - 1),
        "repetition_penalty": (0.01, None, 100), "presence_penalty": (-2, None, 2), "frequency_penalty": (-2, None, 2),
        "seed": (-(2**63), None, 2**63 - 1), "n": (1, None, 64), "num_speculative_tokens": (0, None, 64),
        "min_tokens": (0, None, 2**31 - 1), "max_completion_tokens": (1, None, 2**31 - 1),
        "top_logprobs": (0, None, 20), "best_of": (1, None, 1),
    }.items():  # fmt: skip
        assert tuple(alternatives(properties[name])[0].get(key) for key in keys) == bounds, name
    assert SCHEMAS["CompletionRequest"]["properties"]["max_tokens"]["default"] == 16
    assert SCHEMAS["ChatCompletionRequest"]["properties"]["messages"]["maxItems"] == 2048


@pytest.mark.parametrize(
    "body",
    [
        {f"field{index}": 1 for index in range(100_000)},
        {"prompt": [-1] * 100_000},
        {"prompt": [[-1] * 400] * 250},
        {"prompt": [""] * 250, "stop": [""] * 16},
        {"prompt": "a", "logit_bias": {f"x{index}": "x" for index in range(100_000)}},
        {"prompt": "a", "logit_bias": {f"x{index}": "x" for index in range(1024)}},
        {"prompt": "a", "prediction": {"type": "content", "content": [{f"x{i}": 1 for i in range(1000)}] * 100}},
        {"prompt": "a", "drafters": [5] * 100_000, "stop_token_ids": ["x"] * 100_000},
    ],
    ids=range(8),
)
def test_a_body_full_of_mistakes_costs_no_more_than_one(body: dict[str, Any]) -> None:
    """The library describes each mistake that it meets, so it must not be let meet many."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    assert caught.value.error_count() <= 4


def closed(schemas: dict[str, Any]) -> dict[str, Any]:
    """The same schemas, without room for a field that they do not tell."""
    return {name: schema | {"additionalProperties": False} for name, schema in schemas.items()}


def answers_of(live: LiveServer, path: str, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = "ChatCompletion" if "chat" in path else "TextCompletion"
    response = live.post(path, body)
    assert response.status_code == 200
    yield kind, response.json()
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = live.streamed(path, body | options)
        assert chunks.pop() == "[DONE]"
        yield from ((f"{kind}Chunk", chunk) for chunk in chunks)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_metrics": True, "return_token_ids": True, "n": 2, "prediction": {"type": "content", "content": "a"}},
        {"stop": "propose", "max_tokens": 60},
        {"max_tokens": 3},
    ],
)
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_answers_are_as_described(options: dict[str, Any], with_logprobs: bool) -> None:
    """Whole and streamed, of both endpoints: every field that is sent is told, and none that must come is missing."""
    with live_server() as live:
        chat = {"messages": HELLO} | ({"logprobs": True, "top_logprobs": 2} if with_logprobs else {})
        text = {"prompt": "hello"} | ({"logprobs": 2} if with_logprobs else {"echo": True})
        for path, body in ((CHAT, chat), (COMPLETIONS, text)):
            for kind, answer in answers_of(live, path, body | options):
                validator(kind, closed(SCHEMAS)).validate(answer)


def test_lists_and_errors_are_as_described() -> None:
    """Models, a refusal, an error in the middle of a stream."""
    with live_server(fail_at=2, error=RuntimeError("x")) as live:
        models = httpx.get(live.url + "/v1/models").json()
        validator("ModelList", closed(SCHEMAS)).validate(models)
        validator("ModelCard", closed(SCHEMAS)).validate(models["data"][0])
        validator("ErrorAnswer", closed(SCHEMAS)).validate(live.post(COMPLETIONS, {}).json())
        last = live.streamed(COMPLETIONS, {"prompt": "a", "max_tokens": 50})[-1]
        validator("ErrorAnswer", closed(SCHEMAS)).validate(last)


class Page(HTMLParser):
    """The tags, addresses and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert name in ("href", "id", "lang", "charset"), name
            if name == "href":
                self.addresses.add(value or "")
            elif name == "id":
                self.ids.add(value or "")


@pytest.mark.parametrize("keys", [[], ["one"]])
def test_both_are_served_to_everybody_and_need_nobody_else(keys: list[str]) -> None:
    """Without a key and before a model is known: all routes are told, the page loads nothing and links to itself."""
    options = {"settings": HttpSettings(served_model_names=(CANARY,)), "keys": ApiKeys.from_keys(keys)}
    with live_server(server=options) as live:
        live.state.info = None
        told = httpx.get(live.url + "/openapi.json", timeout=GIVE_UP_S)
        docs = httpx.get(live.url + "/docs", timeout=GIVE_UP_S)
        routes = {route.path.replace(":path", "") for route in live.app.routes}
    assert told.json() == document(bool(keys))
    assert set(told.json()["paths"]) == routes
    shown = Page(docs.text)
    assert docs.headers["content-type"].startswith("text/html")
    assert docs.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not shown.tags & {"script", "link", "img", "iframe", "base", "object", "embed", "form", "video", "audio"}
    assert shown.addresses == {"/openapi.json"} | {f"#{name}" for name in shown.ids}
    assert not re.search(r"https?:|url\(|@import|src=", docs.text)
    for name, schema in SCHEMAS.items():
        assert name in shown.ids
        assert all(f"<code>{field}</code>" in docs.text for field in schema["properties"])
    assert all(path in docs.text for path in routes)
    assert CANARY not in told.text + docs.text


def test_the_page_shows_no_text_as_markup() -> None:
    """Whatever stands in a description is text."""
    info = {"title": "<b>", "version": "&", "description": "<script>x</script> `<i>`"}
    text = page({"info": info, "paths": {}, "components": {"schemas": {}}})
    assert "<script>" not in text
    assert "<code>&lt;i&gt;</code>" in text
