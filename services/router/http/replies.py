"""What both APIs' answers share: usage, speculation metrics, the envelope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.router.http.running import Choice
from services.router.token_bytes import TokenBytes
from services.router.types import DrafterMetrics, GenerationChunk
from services.router.validation import CommonBody


@dataclass(frozen=True, slots=True)
class Envelope:
    """Of one answer. `created` is in Unix seconds. `choices` are numbered prompt-major, `n` of them per prompt."""

    id: str
    created: int
    common: CommonBody
    tokens: TokenBytes
    choices: Sequence[Choice] = field(default_factory=list)

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.common.model, "choices": choices}

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices continue it."""
        firsts = self.choices[:: self.common.n]
        prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.metrics.num_cached_tokens for choice in firsts if choice.metrics)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """`speculative_decoding` in the names of vLLM's statistics, summed over the choices; `drafts` are rounds."""
        known = [choice.metrics for choice in self.choices if choice.metrics]
        positions = [0] * max((len(item.num_accepted_tokens_per_position) for item in known), default=0)
        drafters: dict[str, DrafterMetrics] = {}
        for item in known:
            for position, count in enumerate(item.num_accepted_tokens_per_position):
                positions[position] += count
            for name, one in item.drafters.items():
                so_far = drafters.get(name, DrafterMetrics())
                drafters[name] = DrafterMetrics(
                    so_far.num_proposed_tokens + one.num_proposed_tokens,
                    so_far.num_accepted_tokens + one.num_accepted_tokens,
                    so_far.num_votes_won + one.num_votes_won,
                )
        speculative = {
            "num_drafts": sum(item.num_rounds for item in known),
            "num_draft_tokens": sum(item.num_draft_tokens for item in known),
            "num_accepted_tokens": sum(item.num_accepted_tokens for item in known),
            "num_accepted_tokens_per_pos": positions,
            "drafters": {
                name: {
                    "num_proposed_tokens": one.num_proposed_tokens,
                    "num_accepted_tokens": one.num_accepted_tokens,
                    "num_votes_won": one.num_votes_won,
                }
                for name, one in sorted(drafters.items())
            },
        }
        return {"seed": self.common.seed, "speculative_decoding": speculative}


class Reply(Protocol):
    """An API's shapes, for one request."""

    whole_kind: str
    chunk_kind: str

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first item of a streamed choice, before any token; None: there is none."""
        ...

    def delta(self, choice: Choice, chunk: GenerationChunk) -> dict[str, Any] | None:
        """The streamed item for a chunk already taken by `choice`; None: nothing to tell yet."""
        ...

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The item of a finished choice in an answer that is not streamed."""
        ...


def ids(choice: Choice, token_ids: Sequence[int]) -> dict[str, Any]:
    """The item's own ids, where the request asked for them (vLLM's `return_token_ids`)."""
    return {"token_ids": list(token_ids)} if choice.return_token_ids else {}


def ending(choice: Choice) -> dict[str, Any]:
    reason = choice.finish_reason
    return {"finish_reason": reason.value if reason else None, "stop_reason": choice.stop_reason}
