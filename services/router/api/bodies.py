"""Request bodies as structs: what checks a body and what /openapi.json says of it are the same lines.

Bounds, defaults and descriptions stand here and nowhere else; gRPC requests are read through the same structs. What
only the served model knows (its vocabulary, its context, its names) is checked in requests.py.

No message quotes a value, which may be a part of a caller's text. Sentences are our own, the library's are never shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, WithJsonSchema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from moot.core.errors import BodyTooLarge, InvalidRequest

BodyT = TypeVar("BodyT", bound="Body")

_OWN = "own"
"""The type of errors whose message is a sentence of this module."""
_MAX_INT = 2**31 - 1
_MAX_BIASES = 1024
MAX_NAME_CHARS = 256
_SHOWN_NAME_CHARS = 64


class Body(BaseModel):
    """A JSON object of a request. null is the same as absent; a field that is not listed is refused by its name."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    unsupported: ClassVar[tuple[str, ...]] = ()
    """Fields that other servers have, whose effect is not supported: only null is taken."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        known = cls.__pydantic_fields__
        if not isinstance(values, dict) or (values.keys() <= known.keys() and None not in values.values()):
            return handler(values)
        body = handler({name: value for name, value in values.items() if value is not None and name in known})
        for name, value in values.items():
            if name not in known and not (value is None and name in cls.unsupported):
                problem = "is not supported" if name in cls.unsupported else "is not a supported field"
                shown = name[:_SHOWN_NAME_CHARS].encode("ascii", "backslashreplace").decode("ascii")
                raise PydanticCustomError(_OWN, problem, {"field": shown})
        return body

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = _or_null(field)
        refused = {"type": "null", "description": "Not supported: only null is taken."}
        schema["properties"] |= {name: dict(refused) for name in cls.unsupported}
        return schema


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    if isinstance(schema.get("type"), str) and not {"const", "enum"} & schema.keys():
        return schema | {"type": [schema["type"], "null"]}
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    about = {key: schema.pop(key) for key in ("default", "description") if key in schema}
    return {"anyOf": [schema, {"type": "null"}]} | about


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON allows and UTF-8 and tokenizers do not."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise PydanticCustomError(_OWN, "must be valid Unicode")
    return text


def _false(value: bool) -> bool:
    if value:
        raise PydanticCustomError(_OWN, "is not supported")
    return value


def _biases(value: Any, handler: ValidatorFunctionWrapHandler) -> dict[str, float]:
    """One error for the whole object: its keys are the caller's, and as many as he likes."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise PydanticCustomError(_OWN, f"must be an object of at most {_MAX_BIASES} token ids")
    try:
        biases: dict[str, float] = handler(value)
        return biases
    except ValidationError:
        problem = "must be an object with token ids in decimal as keys and numbers from -100 to 100 as values"
        raise PydanticCustomError(_OWN, problem) from None


def _text_or_list(value: Any) -> str:
    return "(list)" if isinstance(value, list) else "(text)"


def _prompt_form(value: Any) -> str | None:
    if not isinstance(value, list):
        return "(text)" if isinstance(value, str) else None
    first = value[0] if value else None
    return "(lists)" if isinstance(first, list) else "(ids)" if isinstance(first, int) else "(texts)"


Unicode = AfterValidator(_unicode)
Text = Annotated[str, Unicode]
NotEmpty = Annotated[str, Field(min_length=1), Unicode]
StopString = Annotated[str, Field(min_length=1, max_length=256), Unicode]
DrafterId = Annotated[str, Field(min_length=1, max_length=128), Unicode]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
"""Of the vocabulary, which the struct does not know."""
# Lists end at their first bad item: a description of each would cost more than the reading.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
OnlyFalse = Annotated[bool, AfterValidator(_false), WithJsonSchema({"type": "boolean", "const": False})]
TextOrList = Discriminator(_text_or_list)
PromptForm = Discriminator(
    _prompt_form,
    custom_error_type=_OWN,
    custom_error_message="must be a string, a list of strings, a list of token ids or a list of such lists",
)


class TextPart(Body):
    """A piece of a content."""

    type: Literal["text"]
    """Text is the only kind."""
    text: Text
    """The piece itself; may be empty."""


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]


def joined(content: str | list[TextPart], separator: str) -> str:
    return content if isinstance(content, str) else separator.join(part.text for part in content)


class ChatMessage(Body):
    """A turn of a conversation."""

    unsupported = ("name", "refusal", "audio", "function_call", "tool_calls", "tool_call_id", "annotations")

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is the newer word for `system`."""
    content: Annotated[
        Annotated[Text, Tag("(text)")] | Annotated[TextParts, Field(min_length=1), Tag("(list)")], TextOrList
    ]
    """May be empty. Parts become lines."""


class Prediction(Body):
    """The text that the caller expects."""

    type: Literal["content"]
    """The only kind."""
    content: Annotated[Annotated[Text, Tag("(text)")] | Annotated[TextParts, Tag("(list)")], TextOrList]
    """Parts follow each other as they are."""


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text"] = "text"
    """The only one."""


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    """Whether a last chunk tells the usage; the chunks before it carry `usage: null`."""
    include_obfuscation: OnlyFalse = False
    """Chunks are not padded."""
    continuous_usage_stats: OnlyFalse = False
    """Usage is told at the end."""


class SharedFields(Body):
    """What both endpoints take."""

    unsupported = (
        *("audio", "frequency_bias", "function_call", "functions", "grammar", "guided_choice"),
        *("guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern"),
        *("length_penalty", "logits_processors", "metadata", "modalities", "parallel_tool_calls", "prompt_embeds"),
        *("prompt_logprobs", "reasoning_effort", "service_tier", "structured_outputs", "suffix", "tool_choice"),
        *("tools", "truncate_prompt_tokens", "use_beam_search", "verbosity", "web_search_options"),
    )

    model: Annotated[str, Field(max_length=MAX_NAME_CHARS), Unicode] | None = None
    """A served model's name (GET /v1/models); absent: the first one."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0: always the likeliest token."""
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT)] = 0
    """Only so many of the likeliest tokens; 0, -1, and the vocabulary's size or more: no limit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that have this probability together."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Only tokens at least so probable, relative to the likeliest."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides the scores of tokens that prompt or output hold; 1: none."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Taken from the score of a token that the output holds."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Taken from the score of a token for each time that the output holds it."""
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=_MAX_BIASES, json_schema_extra={"additionalProperties": False}),
        WrapValidator(_biases),
    ] = {}
    """Token ids, in decimal and below the vocabulary's size, to what is added to their scores."""
    allowed_token_ids: TokenIds | None = None
    """The only tokens that may come; ids below the vocabulary's size."""
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] = 0
    """Tokens that come before the first one that may end the answer; at most as many as there can be."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] = []
    """Tokens that end the answer beside the model's own; ids below the vocabulary's size."""
    ignore_eos: bool = False
    """Whether the model's own end tokens do not end the answer."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """The same seed and request give the same text; absent: a new one each time."""
    n: Annotated[int, Field(ge=1, le=64)] = 1
    """Choices per prompt."""
    stream: bool = False
    """Whether the answer comes as server-sent events, a chunk for each piece."""
    stream_options: StreamOptions | None = None
    """Only where `stream` is true."""
    stop: Annotated[
        Annotated[StopString, Tag("(text)")]
        | Annotated[list[StopString], Field(max_length=16, fail_fast=True), Tag("(list)")],
        TextOrList,
    ] = []
    """Texts that end the answer, and are not part of it."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""
    include_stop_str_in_output: bool = False
    """Whether the text holds the stop string that ended it."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    """Draft tokens deep per step, at most; 0: no drafts of any kind; absent: as the policy decides. Changes no text."""
    drafters: Annotated[list[DrafterId], Field(max_length=64, fail_fast=True)] | None = None
    """Ids of the drafters that may propose, none of them twice; absent: all. Changes no text."""
    include_metrics: bool = False
    """Whether the answer, or the stream's last chunk, carries `metrics`."""
    return_token_ids: bool = False
    """Whether the answer carries the ids of prompt and output."""
    cache_salt: Annotated[str, Field(max_length=256), Unicode] = ""
    """Requests of another salt share no prefix cache with this one."""
    prediction: Prediction | None = None
    """The likely answer: a drafter of its own. Only beside a single prompt. Changes no text."""
    user: Annotated[str, Field(max_length=512), Unicode] | None = None
    """A label for the caller's own use."""
    response_format: ResponseFormat | None = None
    """Text is the only form."""
    store: OnlyFalse = False
    """Answers are not kept for later."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def predicted_text(self) -> str | None:
        """The likely answer, which may be empty; None: none was sent."""
        return None if self.prediction is None else joined(self.prediction.content, "")


class ChatCompletionRequest(SharedFields):
    """A conversation to be continued."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2048, fail_fast=True)]
    """The conversation so far, in order."""
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    """Of the answer; cut to what the context has room for; absent: all of that."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    """Whether each token comes with its log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """The likeliest alternatives of each token, too; needs `logprobs`."""
    add_generation_prompt: bool = True
    """Whether the template opens a turn of the assistant."""
    continue_final_message: bool = False
    """Whether the last message is continued instead; not together with `add_generation_prompt`."""
    add_special_tokens: OnlyFalse = False
    """The template writes them."""

    @property
    def turns(self) -> tuple[dict[str, str], ...]:
        """The messages as a template takes them: with the older word, and one line per part, so that words of two parts
        do not run together."""
        return tuple(
            {"role": "system" if turn.role == "developer" else turn.role, "content": joined(turn.content, "\n")}
            for turn in self.messages
        )


class CompletionRequest(SharedFields):
    """Prompts to be continued."""

    prompt: Annotated[
        Annotated[NotEmpty, Tag("(text)")]
        | Annotated[list[NotEmpty], Field(min_length=1, max_length=256, fail_fast=True), Tag("(texts)")]
        | Annotated[TokenIds, Tag("(ids)")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256, fail_fast=True), Tag("(lists)")],
        PromptForm,
    ]
    """A text, texts, token ids, or lists of them; shorter than the context, ids below the vocabulary's size."""
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] = 16
    """Of each answer; cut to what the context has room for."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """So many of the likeliest alternatives of each token; not together with `echo`."""
    echo: bool = False
    """Whether the text begins with the prompt's."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its own to a text, as for most models at its beginning."""
    best_of: Annotated[int, Field(ge=1, le=1)] = 1
    """Every choice is told."""

    @cached_property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        given: Sequence[Any] = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        return tuple(one if isinstance(one, str) else tuple(one) for one in given)


_PROBLEMS = {
    "missing": "is required",
    "model_type": "must be an object",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} items",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}
"""What is said of a field, by the library's error; only bounds are put in."""
_ANY_PROBLEM = "is not valid"
"""What is said of an error that a later version of the library may have."""


def read(kind: type[BodyT], values: Mapping[str, Any], names: Mapping[str, str]) -> BodyT:
    """The struct of a body. `names`: how errors name those fields that the caller's API calls otherwise.

    Raises InvalidRequest with `param`.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # Not chained: the library's error holds what the caller sent.
        raise _refusal(error.errors(include_url=False, include_input=False)[0], names) from None


def refusal(field: str, problem: str, names: Mapping[str, str]) -> InvalidRequest:
    shown = names.get(field, field)
    return InvalidRequest(f"`{shown}` {problem}", shown)


def _refusal(error: ErrorDetails, names: Mapping[str, str]) -> InvalidRequest:
    context = error.get("ctx", {})
    bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
    problem = error["msg"] if error["type"] == _OWN else _PROBLEMS.get(error["type"], _ANY_PROBLEM).format_map(bounds)
    # Tags of alternatives stand in the path too; no field's name begins like them.
    path = [step for step in error["loc"] if isinstance(step, int) or step[0] != "("]
    if "field" in context:
        path.append(context["field"])
    # Objects in lists are named by their number, other items by their list.
    of_item = isinstance(path[-1], int) and error["type"] != "model_type"
    while of_item and isinstance(path[-1], int):
        path.pop()
    name = names.get(str(path[0]), str(path[0]))
    name += "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:])
    return InvalidRequest(f"{'each item of ' if of_item else ''}`{name}` {problem}", name)


def parse_json_object(body: bytes, max_depth: int, max_values: int) -> dict[str, Any]:
    """The object in `body`: UTF-8, no NaN or Infinity, at most `max_depth` levels and `max_values` values (about).

    Parsing holds the event loop, so its cost is known before: texts cost next to nothing, each value does. Raises
    InvalidRequest, BodyTooLarge.
    """
    if body.count(b",") > max_values and _has_more_values(body, max_values):
        raise BodyTooLarge(f"the request body must hold at most {max_values} values")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise InvalidRequest(f"the request body is nested deeper than {max_depth} levels") from error
    except _NotFinite as error:
        raise InvalidRequest("the request body contains NaN or Infinity, which are not JSON") from error
    except ValueError as error:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise InvalidRequest("the request body is not valid JSON") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return value
    raise InvalidRequest(f"the request body is nested deeper than {max_depth} levels")


def _has_more_values(body: bytes, max_values: int) -> bool:
    """Whether more commas stand outside texts, in time that grows with the body's size only."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    # A text and its name have four quotes; objects in objects have names without commas, hence the allowance.
    if bare.count(b'"') > 4 * max_values + 10_000:
        return True
    return sum(piece.count(b",") for piece in bare.split(b'"')[::2]) > max_values


class _NotFinite(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _NotFinite(name)


def _children(item: Any) -> Sequence[Any]:
    return list(item.values()) if isinstance(item, dict) else item
