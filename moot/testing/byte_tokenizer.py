"""A tokenizer of 256 bytes, one end token and a chat template, made in memory: ids 0 to 255 are the bytes."""

from __future__ import annotations

from typing import Any

END_TOKEN_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Any:
    """A transformers fast tokenizer; `vocab_size` 257 with the end token."""
    return bytes_as_tokens(["<|end|>"], split_words=False, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def bytes_as_tokens(special_tokens: list[str], *, split_words: bool, **options: Any) -> Any:
    """A transformers fast tokenizer of 256 bytes and special tokens. `options`: of PreTrainedTokenizerFast."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
