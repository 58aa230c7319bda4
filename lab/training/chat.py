"""Token ids of a chat's parts, taken from the tokenizer's own template: what comes before, between and after turns."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("lab.training")

_USER, _ANSWER, _AGAIN = "qxUSERxq", "qxANSWERxq", "qxAGAINxq"
"""Stand for texts while the template is rendered; none of them is a word of any template."""


class Chat:
    """A tokenizer without a chat template gets an empty line between turns."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        try:
            once = self._render([("user", _USER)])
            twice = self._render([("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN)])
            self._before, self._after = once.split(_USER)
            self._between = twice.split(_ANSWER)[1].split(_AGAIN)[0]
        except (ValueError, IndexError, TypeError) as error:
            _log.info("no usable chat template, turns are plain text: %s", error)
            self._before, self._between, self._after = "", "\n\n", "\n\n"

    def _render(self, messages: list[tuple[str, str]]) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def turn(self, text: str, is_first: bool) -> list[int]:
        """What stands before an answer to `text`: at the begin of a chat, else after the answer before it."""
        return self.encode((self._before if is_first else self._between) + text + self._after)

    def open_turn(self, seed: str, is_first: bool) -> list[int]:
        """The begin of a user's turn that the target goes on writing."""
        begin = self._before if is_first else self._between
        # With nothing at all before it a text needs a first token to follow.
        return self.encode(begin + seed) or self.encode("\n\n") or [0]

    def after_open_turn(self) -> list[int]:
        """From the end of a user's turn to its answer."""
        return self.encode(self._after)
