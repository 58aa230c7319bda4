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
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letter[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
