"""The shapes of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.http import logprobs
from services.router.http.replies import ending, ids, prompt_ids
from services.router.http.running import Choice
from services.router.token_bytes import TokenBytes
from services.router.types import GenerationChunk


class CompletionReply:
    """With `echo` a choice's text begins with its `prompt_text`."""

    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens

    def prompt(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {}  # each choice has its own

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.prompt_text:
            return None
        return {"index": choice.index, "text": choice.prompt_text, "logprobs": None, "finish_reason": None}

    def delta(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any] | None:
        new_ids = ids(choice, chunk.token_ids)
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None and not new_ids:
            return None
        begin = choice.num_tokens - len(chunk.token_ids)
        probs = self._logprobs(choice, begin, chunk) if chunk.logprobs else None
        last = ending(choice) if choice.finish_reason else {"finish_reason": None}
        if begin == 0:
            new_ids |= prompt_ids(choice)
        return {"index": choice.index, "text": chunk.text, "logprobs": probs} | last | new_ids

    def whole(self, choice: Choice) -> dict[str, Any]:
        whole = GenerationChunk("", tuple(choice.token_ids), tuple(choice.logprobs))
        probs = None if choice.request.params.logprobs is None else self._logprobs(choice, 0, whole)
        text = choice.prompt_text + "".join(choice.pieces)
        answer = {"index": choice.index, "text": text, "logprobs": probs}
        return answer | ending(choice) | ids(choice, choice.token_ids) | prompt_ids(choice)

    def _logprobs(self, choice: Choice, begin: int, chunk: GenerationChunk) -> dict[str, Any]:
        offsets = choice.text.offsets[begin : begin + len(chunk.token_ids)]
        num_top = choice.request.params.logprobs or 0
        return logprobs.completion(self._tokens, chunk.token_ids, chunk.logprobs, offsets, num_top)
