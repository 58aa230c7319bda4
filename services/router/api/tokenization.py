"""Prompts to token ids, in threads of their own (a long text never stops the event loop); and the bytes of each id.

A thread cannot be stopped: past the timeout the request fails and the thread works on until it is done. So the work is
bounded beforehand: a text that is longer than the context could be, were every token the longest one, is refused by its
size.

`TokenBytes` are the bytes that each token id stands for in a text, derived once from a tokenizer's decoder. A token's
bytes are taken *inside* a text: output follows a prompt, so the leading space that SentencePiece style decoders strip
from the beginning of a text is kept.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from moot.core.errors import ConfigError, ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from services.router.api.settings import HttpSettings

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """`of(id)`: the bytes of a token; `special_token_ids`: ids that `skip_special_tokens` hides.

    `tokenizer`: a transformers fast tokenizer. Raises ConfigError when its decoder is one whose text is not the
    concatenation of its tokens' bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        added = tokenizer.added_tokens_decoder
        self.special_token_ids = frozenset(int(index) for index, token in added.items() if token.special)
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
        to_bytes = _converter(decoder) or _by_difference(tokenizer, vocabulary)
        self._bytes: list[bytes] = [b""] * self.size
        for token, index in vocabulary.items():
            self._bytes[index] = to_bytes(token)
        self.longest_token_bytes = max(len(piece) for piece in self._bytes)
        self._check(tokenizer, decoder)

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id the tokenizer does not have."""
        return self._bytes[token_id] if 0 <= token_id < self.size else b""

    def text(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.of(index) for index in token_ids if index not in hidden).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        r"""One token for a reader: its text, or `bytes:\xe2\x80` when it is only part of a character."""
        piece = self.of(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _check(self, tokenizer: Any, decoder: Any) -> None:
        """Compare with the tokenizer's own decoder on drawn ids. Parts of characters are left out: decoders differ in
        how many U+FFFD they make of an invalid run."""
        whole = [index for index in range(self.size) if self._bytes[index] and _is_utf8(self._bytes[index])]
        if not whole:
            raise ConfigError("the tokenizer has no token that is text")
        draw = random.Random(0)
        for _ in range(50):
            # Two tokens first, so that nothing compared stands at the beginning of a text.
            ids = draw.choices(whole, k=16)
            head = _decode(tokenizer, ids[:2])
            if head + self.text(ids[2:], skip_special_tokens=False) != _decode(tokenizer, ids):
                kind = (decoder or {}).get("type", "none")
                raise ConfigError(f"the tokenizer's decoder ({kind}) cannot be followed token by token")


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _converter(decoder: Any) -> Callable[[str], bytes] | None:
    """Token to bytes for the decoders that can be read off their description; None for any other."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps if step] == ["ByteLevel"]:
        return _byte_level()
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                fused = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "stop": 0} if fused:
                pass  # only at the beginning of a text
            case _:
                return None

    def convert(token: str) -> bytes:
        if byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(found[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    return convert if fused else None


def _byte_level() -> Callable[[str], bytes]:
    # Not with this module: before torch is kept out, the library would load it.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {char: byte for byte, char in bytes_to_unicode().items()}

    def convert(token: str) -> bytes:
        try:
            return bytes(alphabet[char] for char in token)
        except KeyError:  # an added token is written as it is
            return token.encode("utf-8", "replace")

    return convert


def _by_difference(tokenizer: Any, vocabulary: dict[str, int]) -> Callable[[str], bytes]:
    """A token's bytes for any other decoder: what it adds to the text of a token before it."""
    anchor = next(index for index in sorted(vocabulary.values()) if _decode(tokenizer, [index]).strip())
    head = _decode(tokenizer, [anchor])

    def convert(token: str) -> bytes:
        text = _decode(tokenizer, [anchor, vocabulary[token]])
        return text[len(head) :].encode("utf-8", "replace") if text.startswith(head) else b""

    return convert


ResultT = TypeVar("ResultT")


class PromptTokenizer:
    """A transformers fast tokenizer with its chat template. `tokens`: the bytes of its ids."""

    def __init__(self, tokenizer: Any, settings: HttpSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._executor = ThreadPoolExecutor(settings.tokenize_threads, thread_name_prefix="tokenize")
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
        limit = min(context_limit * self.tokens.longest_token_bytes, self._settings.max_prompt_bytes)
        if num_bytes > limit:
            raise ContextLengthExceeded(
                f"`{param}` has {num_bytes} bytes; with this model's context of {context_limit} tokens "
                f"at most {limit} bytes are accepted",
                param,
            )

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        timeout_s = self._settings.tokenize_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"the prompt was not tokenized within {timeout_s:g} s") from error
