"""Reading a request body field by field, strictly: types, ranges, and no field left unread.

No message quotes a value: it may be somebody's text.

The fields of a request body that say how tokens are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from moot.core.errors import BodyTooLarge, InvalidRequest
from moot.core.types import ModelInfo, SamplingParams
from services.router.api.settings import HttpSettings

_SHOWN_NAME_CHARS = 64


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


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """A string that UTF-8 can carry: JSON allows lone surrogates, tokenizers do not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """The fields of one JSON object. null is the same as absent. `finish` refuses what nobody asked for.

    `path`: how errors name this object, for example `messages[2].`; `names`: how they name those of its fields that
    the caller's API calls otherwise.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", names: Mapping[str, str] | None = None) -> None:
        self._values = values
        self._path = path
        self._names = names or {}
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        return self._path + self._names.get(field, field)

    def take(self, field: str) -> Any:
        """The raw value; None when absent or null."""
        self._read.add(field)
        return self._values.get(field)

    def fail(self, field: str, problem: str) -> NoReturn:
        raise InvalidRequest(f"`{self.name(field)}` {problem}", self.name(field))

    def integer(self, field: str, low: int, high: int) -> int | None:
        value = self.take(field)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            self.fail(field, f"must be an integer from {low} to {high}")
        return int(value)

    def number(self, field: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number in [low, high]; with `above`, in (low, high]."""
        value = self.take(field)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it becomes a float: an integer of a thousand digits would overflow.
        if not good or not low <= value <= high or not math.isfinite(value) or (above and value == low):
            self.fail(field, f"must be a number {'above' if above else 'of at least'} {low:g} and at most {high:g}")
        return float(value)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(field, "must be true or false")
        return bool(value)

    def text(self, field: str, max_chars: int) -> str | None:
        value = self.take(field)
        if value is None:
            return None
        if not is_text(value) or len(value) > max_chars:
            self.fail(field, f"must be a string of valid Unicode of at most {max_chars} characters")
        return str(value)

    def nested(self, field: str) -> Fields | None:
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(field, "must be an object")
        return Fields(value, f"{self.name(field)}.")

    def integers(self, field: str, low: int, high: int, max_items: int) -> tuple[int, ...] | None:
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > max_items:
            self.fail(field, f"must be a list of at most {max_items} integers")
        if not all(is_integer(item) and low <= item <= high for item in value):
            self.fail(field, f"must hold integers from {low} to {high} only")
        return tuple(value)

    def texts(self, field: str, max_items: int, max_chars: int) -> tuple[str, ...] | None:
        """A list of strings that are not empty."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > max_items:
            self.fail(field, f"must be a list of at most {max_items} strings")
        if not all(is_text(item) and 0 < len(item) <= max_chars for item in value):
            self.fail(field, f"must hold strings of 1 to {max_chars} characters")
        return tuple(value)

    def neutral(self, field: str, *values: object) -> None:
        """A field whose effect is not supported: only the values that ask for nothing are taken."""
        value = self.take(field)
        if value is not None and not any(type(value) is type(good) and value == good for good in values):
            self.fail(field, "is not supported")

    def finish(self) -> None:
        for field in self._values:
            if field not in self._read:
                shown = field[:_SHOWN_NAME_CHARS].encode("ascii", "backslashreplace").decode("ascii")
                raise InvalidRequest(f"`{self._path}{shown}` is not a supported field", self._path + shown)


MAX_INT = 2**31 - 1


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _number(fields: Fields, field: str, low: float, high: float, default: float, *, above: bool = False) -> float:
    value = fields.number(field, low, high, above=above)
    return default if value is None else value


def read_sampling(fields: Fields, settings: HttpSettings, info: ModelInfo, num_logprobs: int | None) -> SamplingParams:
    """What a body says of how tokens are drawn, without `max_tokens` and `seed`. Raises InvalidRequest with `param`."""
    top_k = _or(fields.integer("top_k", -1, MAX_INT), 0)
    allowed = fields.integers("allowed_token_ids", 0, info.vocab_size - 1, info.vocab_size)
    if allowed is not None and not allowed:
        fields.fail("allowed_token_ids", "must name at least one id")
    return SamplingParams(
        temperature=_number(fields, "temperature", 0, 2, 1.0),
        top_k=0 if top_k < 1 or top_k >= info.vocab_size else top_k,
        top_p=_number(fields, "top_p", 0, 1, 1.0, above=True),
        min_p=_number(fields, "min_p", 0, 1, 0.0),
        repetition_penalty=_number(fields, "repetition_penalty", 0.01, 100, 1.0),
        presence_penalty=_number(fields, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=_number(fields, "frequency_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(fields, settings, info),
        allowed_token_ids=None if allowed is None else frozenset(allowed),
        min_tokens=_or(fields.integer("min_tokens", 0, MAX_INT), 0),
        stop_token_ids=frozenset(
            fields.integers("stop_token_ids", 0, info.vocab_size - 1, settings.max_stop_token_ids) or ()
        ),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=num_logprobs,
    )


def _logit_bias(fields: Fields, settings: HttpSettings, info: ModelInfo) -> dict[int, float]:
    value = fields.take("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > settings.max_logit_bias:
        fields.fail("logit_bias", f"must be an object of at most {settings.max_logit_bias} token ids")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        # The decimal spelling only, so that no id can be given twice ("7" and "07").
        decimal = key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key
        if not decimal or int(key) >= info.vocab_size:
            fields.fail("logit_bias", f"must have token ids from 0 to {info.vocab_size - 1} as keys")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            fields.fail("logit_bias", "must have numbers from -100 to 100 as values")
        bias[int(key)] = float(amount)
    return bias
