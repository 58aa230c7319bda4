"""A target without a model: its next token is a pure function of prefix, parameters and seed, as a real one's is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moot.core.types import FinishReason, SamplingParams

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ScriptedText:
    """The true text. One in `end_period` tokens is the end token; 0: none is.

    Of the parameters it honours temperature and seed (the text of a temperature above the greedy limit depends on the
    seed), min_tokens, stop_token_ids, ignore_eos and max_tokens.
    """

    vocab_size: int = 257
    end_token_id: int = 256
    end_period: int = 0

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset({self.end_token_id})

    def token_after(self, prefix: Sequence[int], num_output: int, params: SamplingParams) -> int:
        """The token at position len(prefix); `num_output` of the prefix are output."""
        return self.token_at(len(prefix), prefix[-4:], num_output, params)

    def token_at(self, position: int, tail: Sequence[int], num_output: int, params: SamplingParams) -> int:
        """As `token_after`, of a prefix of `position` ids whose last four (or fewer) are `tail`."""
        ending = params.ending_token_ids(self.end_token_ids)
        masked = ending if num_output < params.min_tokens else frozenset()
        state = position * 0x9E3779B1 + (0 if params.is_greedy else params.seed * 0x85EBCA6B)
        for token in tail:
            state = (state * 31 + token + 1) & _MASK
        state &= _MASK
        while True:
            state = _mix(state)
            token = state % (self.vocab_size - 1)
            if token >= self.end_token_id:
                token += 1
            if self.end_period and (state >> 12) % self.end_period == 0:
                token = self.end_token_id
            if token not in masked:
                return token

    def is_end(self, token: int, num_output: int, params: SamplingParams) -> bool:
        """Whether `token`, as the `num_output`-th output token, ends the request."""
        return num_output >= params.min_tokens and token in params.ending_token_ids(self.end_token_ids)

    def plain(
        self, prompt: Sequence[int], params: SamplingParams, context_limit: int = 1 << 30
    ) -> tuple[tuple[int, ...], FinishReason]:
        """Plain decoding: what every request must get, however it is drafted."""
        prefix = list(prompt)
        while True:
            num_output = len(prefix) - len(prompt)
            if num_output >= params.max_tokens or len(prefix) >= context_limit:
                return tuple(prefix[len(prompt) :]), FinishReason.LENGTH
            prefix.append(self.token_after(prefix, num_output, params))
            if self.is_end(prefix[-1], num_output + 1, params):
                return tuple(prefix[len(prompt) :]), FinishReason.STOP

    def continuation(self, prefix: Sequence[int], num_output: int, params: SamplingParams, count: int) -> list[int]:
        """The next `count` tokens, an end notwithstanding: what a perfect drafter proposes."""
        tokens = list(prefix[-4:])
        for index in range(count):
            tokens.append(self.token_at(len(prefix) + index, tokens[-4:], num_output + index, params))
        return tokens[len(prefix[-4:]) :]


def _mix(state: int) -> int:
    """A bijection of 32-bit numbers that scatters them well."""
    state = (state + 0x7F4A7C15) & _MASK
    state = ((state ^ (state >> 16)) * 0x21F0AAAD) & _MASK
    state = ((state ^ (state >> 15)) * 0x735A2D97) & _MASK
    return state ^ (state >> 15)
