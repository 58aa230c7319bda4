"""Replies of both endpoints, /v1/chat/completions and /v1/completions: shapes, log-probabilities, usage, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from typing import Any, ClassVar

from moot.core.types import TokenLogprobs
from services.router.api.choices import Choice
from services.router.api.requests import Checked
from services.router.api.tokenization import TokenBytes
from services.router.generation.request_types import DrafterMetrics, GenerationChunk

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


PREDICTION = "prediction"
"""The drafter that proposes what a request predicts."""


@dataclass(frozen=True)
class Reply:
    """The reply to one request, whole or in chunks. `created` is in Unix seconds. `choices` are numbered prompt-major,
    `n` of them per prompt."""

    id: str
    created: int
    checked: Checked[Any]
    tokens: TokenBytes
    choices: Sequence[Choice]

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def prompt(self) -> dict[str, Any]:
        """The fields beside the choices of an answer, or of a stream's first chunk, about the prompt."""
        return {}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first item of a streamed choice, before any token; None: there is none."""
        raise NotImplementedError

    def delta(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any] | None:
        """The streamed item for a chunk already taken by `choice`; None: nothing to tell yet."""
        new_ids = ids(choice, chunk.token_ids)
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None and not new_ids:
            return None
        item = self.piece(choice, chunk)
        item |= ending(choice) if choice.finish_reason else {"finish_reason": None}
        item |= new_ids
        return item

    def piece(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any]:
        """Index, text and log-probabilities of a chunk."""
        raise NotImplementedError

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The item of a finished choice in an answer that is not streamed."""
        raise NotImplementedError

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.checked.model, "choices": choices}

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices continue it."""
        firsts = self.choices[:: self.checked.body.n]
        prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.metrics.num_cached_tokens for choice in firsts if choice.metrics)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        } | ({} if self.checked.body.prediction is None else {"completion_tokens_details": self._predicted()})

    def _predicted(self) -> dict[str, int]:
        """What the prediction was worth, summed over the choices: tokens of the completion that it had proposed, and
        tokens that it proposed in vain. A rejected one is part of no other count."""
        counts = [
            choice.metrics.drafters[PREDICTION]
            for choice in self.choices
            if choice.metrics and PREDICTION in choice.metrics.drafters
        ]
        accepted = sum(count.num_accepted_tokens for count in counts)
        proposed = sum(count.num_proposed_tokens for count in counts)
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}

    def metrics(self) -> dict[str, Any]:
        """`metrics`, where the request asked for them. `speculative_decoding`: first what vLLM reports of a request,
        then its server-wide counts of the same and, our own, what each drafter did; summed over the choices. A vLLM
        step is a round: one without a draft accepted nothing. A rate without anything to divide by is null."""
        if not self.checked.body.include_metrics:
            return {}
        known = [choice.metrics for choice in self.choices if choice.metrics]
        num_rounds = sum(item.num_rounds for item in known)
        num_drafted = sum(item.num_draft_tokens for item in known)
        num_accepted = sum(item.num_accepted_tokens for item in known)
        positions = _sums([item.num_accepted_tokens_per_position for item in known])
        # Rounds that accepted at least j tokens, for j from 0.
        reached = [num_rounds, *positions, 0]
        speculative = {
            "mean_acceptance_length": 1 + num_accepted / num_rounds if num_rounds else None,
            "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
            "acceptance_histogram": [here - after for here, after in pairwise(reached)],
            "num_spec_steps": num_rounds,
            "num_accepted_draft_tokens": num_accepted,
            "num_drafts": num_rounds,
            "num_draft_tokens": num_drafted,
            "num_accepted_tokens": num_accepted,
            "num_accepted_tokens_per_pos": positions,
            "drafters": _by_drafter([item.drafters for item in known]),
        }
        return {"metrics": {"seed": self.checked.seed, "speculative_decoding": speculative}}


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _by_drafter(counts: Sequence[Mapping[str, DrafterMetrics]]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for one in counts:
        for name, drafter in one.items():
            so_far = sums.setdefault(name, {})
            for field_name, value in asdict(drafter).items():
                so_far[field_name] = so_far.get(field_name, 0) + value
    return dict(sorted(sums.items()))


def ids(choice: Choice, token_ids: Sequence[int]) -> dict[str, Any]:
    """The item's own ids, where the request asked for them (vLLM's `return_token_ids`)."""
    return {"token_ids": list(token_ids)} if choice.return_token_ids else {}


def prompt_ids(choice: Choice) -> dict[str, Any]:
    """The ids of the prompt, where the request asked for ids."""
    return {"prompt_token_ids": list(choice.request.prompt_token_ids)} if choice.return_token_ids else {}


def ending(choice: Choice) -> dict[str, Any]:
    reason = choice.finish_reason
    return {"finish_reason": reason.value if reason else None, "stop_reason": choice.stop_reason}


class ChatReply(Reply):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def prompt(self) -> dict[str, Any]:
        return prompt_ids(self.choices[0])

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        # The choice may have ended with its first chunk: that is told with the text, once.
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any]:
        probs = chat_content(self.tokens, chunk.token_ids, chunk.logprobs) if chunk.logprobs else None
        delta = {"content": chunk.text} if chunk.text or probs else {}
        return {"index": choice.index, "delta": delta, "logprobs": probs}

    def whole(self, choice: Choice) -> dict[str, Any]:
        wanted = choice.request.params.logprobs is not None
        return (
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
                "logprobs": chat_content(self.tokens, choice.token_ids, choice.logprobs) if wanted else None,
            }
            | ending(choice)
            | ids(choice, choice.token_ids)
        )


class CompletionReply(Reply):
    """With `echo` a choice's text begins with its `prompt_text`; each choice has its own prompt."""

    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.prompt_text:
            return None
        return {"index": choice.index, "text": choice.prompt_text, "logprobs": None, "finish_reason": None}

    def delta(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any] | None:
        item = super().delta(choice, chunk)
        if item is not None and choice.num_tokens == len(chunk.token_ids):
            item |= prompt_ids(choice)
        return item

    def piece(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any]:
        begin = choice.num_tokens - len(chunk.token_ids)
        probs = self._logprobs(choice, begin, chunk.token_ids, chunk.logprobs) if chunk.logprobs else None
        return {"index": choice.index, "text": chunk.text, "logprobs": probs}

    def whole(self, choice: Choice) -> dict[str, Any]:
        wanted = choice.request.params.logprobs is not None
        probs = self._logprobs(choice, 0, choice.token_ids, choice.logprobs) if wanted else None
        text = choice.prompt_text + "".join(choice.pieces)
        answer = {"index": choice.index, "text": text, "logprobs": probs}
        return answer | ending(choice) | ids(choice, choice.token_ids) | prompt_ids(choice)

    def _logprobs(
        self, choice: Choice, begin: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        offsets = choice.text.offsets[begin : begin + len(token_ids)]
        num_top = choice.request.params.logprobs or 0
        return completion(self.tokens, token_ids, logprobs, offsets, num_top)
