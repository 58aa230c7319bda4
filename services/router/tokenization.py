"""Prompts to token ids, in threads of their own: a long text never stops the event loop.

A thread cannot be stopped: past the timeout the request fails and the thread works on until it is done. So the work
is bounded beforehand: a text that is longer than the context could be, were every token the longest one, is refused
by its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from moot.core.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from services.router.token_bytes import TokenBytes

ResultT = TypeVar("ResultT")


class PromptTokenizer:
    """A transformers fast tokenizer with its chat template. `tokens`: the bytes of its ids."""

    def __init__(self, tokenizer: Any, *, timeout_s: float, num_threads: int, max_prompt_bytes: int) -> None:
        """`max_prompt_bytes`: whatever the context, a longer prompt is not tokenized."""
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._max_prompt_bytes = max_prompt_bytes
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.tokens = TokenBytes(tokenizer)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, context_limit: int, param: str
    ) -> tuple[tuple[int, ...], ...]:
        """Ids of each text. Raises ContextLengthExceeded (by size) and DeadlineExceeded."""
        for text in texts:
            self._check_size(len(text.encode("utf-8")), context_limit, param)
        return await self._run(lambda: tuple(self._encode(text, add_special_tokens) for text in texts))

    async def encode_prediction(self, text: str | None, *, context_limit: int, param: str) -> tuple[int, ...]:
        """Ids of the answer that a request expects; none without one. Bounded like a prompt, and raises as `encode`."""
        if not text:
            return ()
        (ids,) = await self.encode([text], add_special_tokens=False, context_limit=context_limit, param=param)
        if len(ids) > context_limit:
            raise ContextLengthExceeded(
                f"`{param}` has {len(ids)} tokens; this model's context is {context_limit} tokens", param
            )
        return ids

    async def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        context_limit: int,
        param: str,
    ) -> tuple[int, ...]:
        """Ids of the conversation in the model's chat template. InvalidRequest: there is none, or it refuses."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; give it a prompt (/v1/completions) instead", param)
        size = sum(len(message["content"].encode("utf-8")) for message in messages)
        self._check_size(size, context_limit, param)

        def render_and_encode() -> tuple[int, ...]:
            try:
                ids = self._tokenizer.apply_chat_template(
                    list(messages),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=True,
                    return_dict=False,
                    # What a message says is text: it must not open or close a turn.
                    sanitize_control_tokens=True,
                )
            except (TemplateError, TypeError, ValueError) as error:
                # A bare TemplateError is the template's own sentence to the caller; the others quote anything.
                said = str(error)[:200] if type(error) is TemplateError else "not in a form it can render"
                raise InvalidRequest(f"the chat template refuses the messages: {said}", param) from error
            return tuple(int(index) for index in ids)

        return await self._run(render_and_encode)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        encoded = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return tuple(encoded["input_ids"])

    def _check_size(self, num_bytes: int, context_limit: int, param: str) -> None:
        limit = min(context_limit * self.tokens.longest_token_bytes, self._max_prompt_bytes)
        if num_bytes > limit:
            raise ContextLengthExceeded(
                f"`{param}` has {num_bytes} bytes; with this model's context of {context_limit} tokens "
                f"at most {limit} bytes are accepted",
                param,
            )

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"the prompt was not tokenized within {self._timeout_s:g} s") from error
