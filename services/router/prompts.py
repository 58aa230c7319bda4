"""What a request wants continued: the prompts of a completion, the messages of a chat; and what it expects then."""

from __future__ import annotations

from typing import Any

from moot.core.errors import ContextLengthExceeded, InvalidRequest
from moot.core.types import ModelInfo
from services.router.fields import Fields, is_integer, is_text
from services.router.settings import HttpSettings

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
