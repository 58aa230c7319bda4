"""A request body, checked completely, and what it asks for: one GenerationRequest per choice.

The list of fields is closed: an unknown field, or one whose effect is not supported, is refused by its name.
Defaults: temperature 1, top_p 1, n 1; `max_tokens` of a completion 16, of a chat the rest of the context; a larger
`max_tokens` than fits is cut to what fits. `top_k` -1 and 0 mean no limit. `top_p` 0 is refused.

What a request wants continued: the prompts of a completion, the messages of a chat; and what it expects then.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moot.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from moot.core.noise import choice_seed
from moot.core.types import ModelInfo, SamplingParams
from moot.drafters.request.siblings import Siblings
from services.router.api.fields import MAX_INT, Fields, is_integer, is_text, read_sampling
from services.router.api.settings import HttpSettings
from services.router.generation.types import GenerationRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""`developer` is OpenAI's newer word for `system`; chat templates know the old one."""


def read_prompts(fields: Fields, settings: HttpSettings, info: ModelInfo) -> tuple[str | tuple[int, ...], ...]:
    value = fields.take("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and is_integer(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        fields.fail("prompt", "must be a string, a list of strings, a list of token ids or a list of such lists")
    if len(value) > settings.max_prompts:
        fields.fail("prompt", f"must be at most {settings.max_prompts} prompts")
    if any(type(item) is not type(value[0]) for item in value):
        fields.fail("prompt", "must not mix strings and token ids")
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if is_text(item):
            prompts.append(item)
        elif isinstance(item, list) and len(item) > info.context_limit:
            raise too_long(len(item), info, fields.name("prompt"))
        elif isinstance(item, list) and all(is_integer(index) and 0 <= index < info.vocab_size for index in item):
            prompts.append(tuple(item))
        else:
            fields.fail("prompt", f"must be valid Unicode text, or token ids from 0 to {info.vocab_size - 1}")
        if not item:
            fields.fail("prompt", "must not be empty")
    return tuple(prompts)


def too_long(num_tokens: int, info: ModelInfo, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {num_tokens} tokens; this model's context is {info.context_limit} tokens, "
        "at least one of them for the output",
        param,
    )


def read_messages(fields: Fields, settings: HttpSettings) -> tuple[dict[str, str], ...]:
    value = fields.take("messages")
    if not isinstance(value, list) or not 0 < len(value) <= settings.max_messages:
        fields.fail("messages", f"must be a list of 1 to {settings.max_messages} messages")
    return tuple(_message(fields, index, message) for index, message in enumerate(value))


def read_prediction(fields: Fields) -> str | None:
    """The text that the caller expects (OpenAI's `prediction`); its parts follow each other as they are."""
    prediction = fields.nested("prediction")
    if prediction is None:
        return None
    if prediction.take("type") != "content":
        prediction.fail("type", "must be content")
    content = prediction.take("content")
    if isinstance(content, list):
        content = "".join(_text_part(prediction, number, part) for number, part in enumerate(content))
    if not is_text(content):
        prediction.fail("content", "must be a string of valid Unicode or a list of text parts")
    prediction.finish()
    return str(content)


def _message(fields: Fields, index: int, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        name = f"{fields.name('messages')}[{index}]"
        raise InvalidRequest(f"`{name}` must be an object", name)
    message = Fields(value, f"{fields.name('messages')}[{index}].")
    role = message.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        message.fail("role", f"must be one of {', '.join(_ROLES)}")
    content = message.take("content")
    if isinstance(content, list) and content:
        # One line per part, so that words of two parts do not run together.
        content = "\n".join(_text_part(message, number, part) for number, part in enumerate(content))
    if not is_text(content):
        message.fail("content", "must be a string of valid Unicode or a list of text parts")
    for field in ("name", "refusal", "audio", "function_call", "tool_calls", "tool_call_id", "annotations"):
        message.neutral(field)
    message.finish()
    return {"role": _ROLES[role], "content": content}


def _text_part(message: Fields, number: int, value: Any) -> str:
    if not isinstance(value, dict):
        message.fail(f"content[{number}]", "must be an object")
    part = Fields(value, message.name(f"content[{number}]."))
    kind, text = part.take("type"), part.take("text")
    if kind != "text":
        part.fail("type", "must be text")
    if not is_text(text):
        part.fail("text", "must be a string of valid Unicode")
    part.finish()
    return str(text)


_UNSUPPORTED = (
    "audio", "frequency_bias", "function_call", "functions", "grammar", "guided_choice", "guided_decoding_backend",
    "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "length_penalty", "logits_processors",
    "metadata", "modalities", "parallel_tool_calls", "prompt_embeds", "prompt_logprobs",
    "reasoning_effort", "service_tier", "structured_outputs", "suffix", "tool_choice", "tools",
    "truncate_prompt_tokens", "use_beam_search", "verbosity", "web_search_options",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommonBody:
    """What both endpoints share. `params` lacks max_tokens and seed, which depend on prompt and choice."""

    model: str
    params: SamplingParams
    max_tokens: int | None
    seed: int
    n: int
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    num_speculative_tokens: int | None
    drafters: tuple[str, ...] | None
    include_metrics: bool
    return_token_ids: bool
    cache_salt: str
    prediction: str | None
    """The likely answer, which may be empty; None: none was sent."""


@dataclass(frozen=True, slots=True)
class CompletionBody:
    common: CommonBody
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ChatBody:
    common: CommonBody
    messages: tuple[dict[str, str], ...]
    add_generation_prompt: bool
    continue_final_message: bool


def parse_completion(
    values: dict[str, Any],
    settings: HttpSettings,
    info: ModelInfo,
    drafter_ids: frozenset[str] | None,
    names: Mapping[str, str] | None = None,
) -> CompletionBody:
    """Raises InvalidRequest with `param`, or ModelNotFound. `names`: see Fields."""
    fields = Fields(values, names=names)
    model = _model(fields, settings)
    prompts = read_prompts(fields, settings, info)
    num_logprobs = fields.integer("logprobs", 0, settings.max_logprobs)
    fields.neutral("best_of", 1)
    echo = fields.boolean("echo")
    if echo and num_logprobs is not None:
        fields.fail("echo", "together with logprobs is not supported")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    max_tokens = fields.integer("max_tokens", 1, MAX_INT) or settings.default_completion_tokens
    common = _common(fields, settings, info, drafter_ids, model, max_tokens, num_logprobs)
    if len(prompts) * common.n > settings.max_choices:
        fields.fail("n", f"times the number of prompts must be at most {settings.max_choices}")
    if len(prompts) > 1 and common.prediction is not None:
        fields.fail("prediction", "needs a single prompt")
    return CompletionBody(common, prompts, echo, add_special_tokens)


def parse_chat(
    values: dict[str, Any],
    settings: HttpSettings,
    info: ModelInfo,
    drafter_ids: frozenset[str] | None,
    names: Mapping[str, str] | None = None,
) -> ChatBody:
    """Raises InvalidRequest with `param`, or ModelNotFound. `names`: see Fields."""
    fields = Fields(values, names=names)
    model = _model(fields, settings)
    messages = read_messages(fields, settings)
    wants_logprobs = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", 0, settings.max_logprobs)
    if num_top is not None and not wants_logprobs:
        fields.fail("top_logprobs", "needs `logprobs` to be true")
    max_tokens = fields.integer("max_tokens", 1, MAX_INT)
    max_completion_tokens = fields.integer("max_completion_tokens", 1, MAX_INT)
    if max_tokens is not None and max_completion_tokens not in (None, max_tokens):
        fields.fail("max_completion_tokens", "and `max_tokens` are the same limit: give one of them")
    fields.neutral("add_special_tokens", False)  # the template writes them
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    continue_final_message = fields.boolean("continue_final_message")
    if continue_final_message and values.get("add_generation_prompt"):
        fields.fail("continue_final_message", "and `add_generation_prompt` exclude each other")
    common = _common(
        fields,
        settings,
        info,
        drafter_ids,
        model,
        max_completion_tokens if max_tokens is None else max_tokens,
        (num_top or 0) if wants_logprobs else None,
    )
    return ChatBody(common, messages, add_generation_prompt and not continue_final_message, continue_final_message)


def plan_requests(
    common: CommonBody,
    prompts: tuple[tuple[int, ...], ...],
    info: ModelInfo,
    base_id: str,
    caller: str,
    fingerprint: str,
    param: str,
    prediction: tuple[int, ...] = (),
) -> tuple[GenerationRequest, ...]:
    """One request per choice, numbered prompt-major. `param`: the field the prompts came from, for errors;
    `prediction`: ids of the likely answer."""
    salt = hashlib.sha256(f"{caller}\0{common.cache_salt}".encode()).hexdigest()[:32]
    planned: list[GenerationRequest] = []
    for prompt in prompts:
        room = info.context_limit - len(prompt)
        if not prompt:
            raise InvalidRequest(f"`{param}` has no tokens", param)
        if room < 1:
            raise too_long(len(prompt), info, param)
        max_tokens = room if common.max_tokens is None else min(common.max_tokens, room)
        if common.params.min_tokens > max_tokens:
            raise InvalidRequest(f"`min_tokens` is more than the {max_tokens} tokens there can be", "min_tokens")
        siblings = Siblings(common.n) if common.n > 1 else None
        for choice_index in range(common.n):
            index = len(planned)
            planned.append(
                GenerationRequest(
                    request_id=f"{base_id}-{index}",
                    prompt_token_ids=prompt,
                    params=replace(common.params, max_tokens=max_tokens, seed=choice_seed(common.seed, index)),
                    num_speculative_tokens=common.num_speculative_tokens,
                    drafters=common.drafters,
                    # Callers do not see each other's prefix cache; without keys all are one caller.
                    cache_salt=salt if caller or common.cache_salt else "",
                    body_fingerprint=fingerprint,
                    stop_strings=common.stops,
                    skip_special_tokens=common.skip_special_tokens,
                    include_stop_str_in_output=common.include_stop_str_in_output,
                    prediction_token_ids=prediction,
                    siblings=siblings,
                    choice_index=choice_index,
                )
            )
    return tuple(planned)


def _model(fields: Fields, settings: HttpSettings) -> str:
    name = fields.text("model", 256)
    if name is None:
        return settings.served_model_names[0]
    if name not in settings.served_model_names:
        raise ModelNotFound(f"this server serves {', '.join(settings.served_model_names)}, not the model asked for")
    return name


def _common(
    fields: Fields,
    settings: HttpSettings,
    info: ModelInfo,
    drafter_ids: frozenset[str] | None,
    model: str,
    max_tokens: int | None,
    num_logprobs: int | None,
) -> CommonBody:
    params = read_sampling(fields, settings, info, num_logprobs)
    if max_tokens is not None and params.min_tokens > max_tokens:
        fields.fail("min_tokens", "is more than max_tokens")
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    stream = fields.boolean("stream")
    include_usage = _stream_options(fields, stream)
    fields.text("user", 512)  # a label for the caller's own use
    drafters = fields.texts("drafters", settings.max_drafters, 128)
    if drafters is not None and drafter_ids is not None and not drafter_ids.issuperset(drafters):
        fields.fail("drafters", f"must be some of: {', '.join(sorted(drafter_ids)) or 'none is configured'}")
    if drafters is not None and len(set(drafters)) < len(drafters):
        fields.fail("drafters", "names a drafter twice")
    if (form := fields.nested("response_format")) is not None:
        form.neutral("type", "text")
        form.finish()
    fields.neutral("store", False)
    for name in _UNSUPPORTED:
        fields.neutral(name)
    common = CommonBody(
        model=model,
        params=params,
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if seed is None else seed,
        n=fields.integer("n", 1, settings.max_n) or 1,
        stream=stream,
        include_usage=include_usage,
        stops=_stops(fields, settings),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
        num_speculative_tokens=fields.integer("num_speculative_tokens", 0, settings.max_speculative_tokens),
        drafters=drafters,
        include_metrics=fields.boolean("include_metrics"),
        return_token_ids=fields.boolean("return_token_ids"),
        cache_salt=fields.text("cache_salt", 256) or "",
        prediction=read_prediction(fields),
    )
    fields.finish()
    return common


def _stops(fields: Fields, settings: HttpSettings) -> tuple[str, ...]:
    if is_text(fields.take("stop")):
        fields = Fields({"stop": [fields.take("stop")]})
    return tuple(dict.fromkeys(fields.texts("stop", settings.max_stop_strings, settings.max_stop_chars) or ()))


def _stream_options(fields: Fields, stream: bool) -> bool:
    options = fields.nested("stream_options")
    if options is None:
        return False
    if not stream:
        fields.fail("stream_options", "needs `stream` to be true")
    include_usage = options.boolean("include_usage")
    options.neutral("include_obfuscation", False)
    options.neutral("continuous_usage_stats", False)
    options.finish()
    return include_usage
