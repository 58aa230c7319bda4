"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moot.core.types import TokenLogprobs
from services.router.token_bytes import TokenBytes

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_content(tokens: TokenBytes, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """{"content": one entry per token, "refusal": null}."""
    content = [
        _entry(tokens, token_id, row.logprob) | {"top_logprobs": [_entry(tokens, *pair) for pair in row.top]}
        for token_id, row in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion(
    tokens: TokenBytes,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    num_top: int,
) -> dict[str, Any]:
    """Four lists with one item per token; the alternatives contain the token itself, as OpenAI's do."""
    tops = []
    for token_id, row in zip(token_ids, logprobs, strict=True):
        top = {tokens.token_text(index): _finite(value) for index, value in row.top} if num_top else {}
        top.setdefault(tokens.token_text(token_id), _finite(row.logprob))
        tops.append(top)
    return {
        "tokens": [tokens.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [_finite(row.logprob) for row in logprobs],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _entry(tokens: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokens.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokens.of(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
