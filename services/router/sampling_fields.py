"""The fields of a request body that say how tokens are drawn."""

from __future__ import annotations

from moot.core.types import ModelInfo, SamplingParams
from services.router.fields import Fields
from services.router.settings import HttpSettings

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
