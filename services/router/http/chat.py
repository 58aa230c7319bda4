"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.http import logprobs
from services.router.http.replies import ending, ids, prompt_ids
from services.router.http.running import Choice
from services.router.token_bytes import TokenBytes
from services.router.types import GenerationChunk


class ChatReply:
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens

    def prompt(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return prompt_ids(choices[0])

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        # The choice may have ended with its first chunk: that is told with the text, once.
        return self._item(choice, {"role": "assistant", "content": ""}, None, {"finish_reason": None})

    def delta(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any] | None:
        probs = logprobs.chat_content(self._tokens, chunk.token_ids, chunk.logprobs) if chunk.logprobs else None
        new_ids = ids(choice, chunk.token_ids)
        if not chunk.text and probs is None and chunk.finish_reason is None and not new_ids:
            return None
        delta = {"content": chunk.text} if chunk.text or probs else {}
        last = ending(choice) if choice.finish_reason else {"finish_reason": None}
        return self._item(choice, delta, probs, last) | new_ids

    def whole(self, choice: Choice) -> dict[str, Any]:
        wanted = choice.request.params.logprobs is not None
        return (
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
                "logprobs": logprobs.chat_content(self._tokens, choice.token_ids, choice.logprobs) if wanted else None,
            }
            | ending(choice)
            | ids(choice, choice.token_ids)
        )

    def _item(
        self, choice: Choice, delta: dict[str, Any], probs: dict[str, Any] | None, last: dict[str, Any]
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": probs} | last
