"""Sessions of scripted peers: what a peer knows of a request, and how a scripted verifier advances one."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.acceptance import walk
from moot.core.types import Draft, SamplingParams, TokenLogprobs, Verification
from moot.testing.scripted_text import ScriptedText


@dataclass(slots=True)
class ScriptedSession:
    """A request as a scripted peer knows it. `prefix`: prompt and output, of which the first `num_prompt` ids are the
    prompt."""

    prefix: list[int]
    num_prompt: int
    params: SamplingParams

    @property
    def num_output(self) -> int:
        return len(self.prefix) - self.num_prompt


@dataclass(slots=True)
class VerifiedSession(ScriptedSession):
    request_id: str
    num_top_candidates: int
    round_index: int = -1
    inside_drafter_ids: tuple[str, ...] = ()
    inside_width: int = 1

    def advance(self, text: ScriptedText, draft: Draft, context_limit: int) -> Verification:
        """Verify `draft` against the text and append what comes of it to the prefix."""
        params, base, num_output = self.params, len(self.prefix), self.num_output
        tail = tuple(self.prefix[-4:])
        result = walk(
            draft,
            lambda node, path: text.token_at(base + len(path), (tail + path)[-4:], num_output + len(path), params),
            lambda token, count: text.is_end(token, num_output + count, params),
            min(params.max_tokens - num_output, context_limit - base),
        )
        self.prefix.extend(result.output_token_ids)
        tokens = list(enumerate(result.output_token_ids, base)) if params.logprobs is not None else []
        width, size = self.num_top_candidates, text.vocab_size
        rows = tuple(tuple((token + i) % size for i in range(width)) for token in result.output_token_ids)
        return Verification(
            base_length=base,
            num_accepted=result.num_accepted,
            output_token_ids=result.output_token_ids,
            finish_reason=result.finish,
            logprobs=tuple(scripted_logprobs(position, token) for position, token in tokens),
            top_candidates=rows if width else (),
        )


def scripted_logprobs(position: int, token: int) -> TokenLogprobs:
    """The log-probabilities that the scripted verifier reports for `token` at `position` of prompt + output: exact in
    float32."""
    return TokenLogprobs(-(token + 1) / 256, 1 + position % 7, ((token, -(token + 1) / 256),))
