"""What a choice must be: plain decoding's ids, numbers, text and end; and what the counters of it must say. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moot.core.types import FinishReason, TokenLogprobs
from moot.runtime.metrics import Metrics
from moot.testing.tiny_model import SPECIAL_TOKENS
from services.router.generation.request_types import GenerationMetrics, GenerationRequest
from tests.paths.path_drawing import VOCAB_SIZE, Case

if TYPE_CHECKING:
    from tests.paths.path_plain import Plain
    from tests.paths.path_play import Outcome


@dataclass(frozen=True)
class Expected:
    """Of one choice: plain decoding's output, cut where a stop string ends it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None


def expect(request: GenerationRequest, plain: Plain, end_token_ids: frozenset[int]) -> Expected:
    """By the rules that services/router/api/text.py states, from the whole output and without its code."""
    ids, reason = plain.token_ids, plain.finish_reason
    ending = request.params.ending_token_ids(end_token_ids)
    shows_end = request.include_stop_str_in_output

    def bytes_of(id_: int) -> bytes:
        if id_ in ending and not shows_end:
            return b""
        if id_ < 256:
            return bytes([id_])
        return b"" if request.skip_special_tokens else SPECIAL_TOKENS[id_ - 256].encode()

    text = ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for number, id_ in enumerate(ids, start=1):
        for char in decoder.decode(bytes_of(id_)):
            text += char
            found = [stop for stop in request.stop_strings if text.endswith(stop)]
            if found and number > request.params.min_tokens:
                stop = max(found, key=len)
                kept = text if shows_end else text[: len(text) - len(stop)]
                return Expected(ids[:number], kept, FinishReason.STOP, stop)
    own = reason is FinishReason.STOP and ids[-1] in request.params.stop_token_ids
    return Expected(ids, text, reason, ids[-1] if own else None)


def _carried(entry: TokenLogprobs) -> TokenLogprobs:
    """Messages hold 32-bit numbers."""
    top = tuple((id_, float(np.float32(logprob))) for id_, logprob in entry.top)
    return TokenLogprobs(float(np.float32(entry.logprob)), entry.rank, top)


def check_choice(outcome: Outcome, case: Case) -> list[str]:
    """Every way in which it differs."""
    expected, last = outcome.expected, outcome.last
    if last is None or last.finish_reason is None or last.metrics is None:
        return ["the choice has no end"]
    problems: list[str] = []

    def same(what: str, got: object, wanted: object) -> None:
        if got != wanted:
            problems.append(f"{outcome.request.request_id}: {what} is {got!r}, plain decoding's {wanted!r}")

    same("output", outcome.token_ids, expected.token_ids)
    same("text", outcome.text, expected.text)
    same("finish reason", last.finish_reason, expected.finish_reason)
    same("stop reason", last.stop_reason, expected.stop_reason)
    # Bit by bit, as far as the wire carries them: a number that is off a little is another number.
    same("logprobs", outcome.logprobs, tuple(map(_carried, outcome.plain.logprobs[: len(expected.token_ids)])))
    problems += [f"{outcome.request.request_id}: {one}" for one in _counts(outcome, last.metrics)]
    if unknown := set(last.metrics.drafters) - set(case.body.get("drafters", case.system.drafters)):
        problems.append(f"{outcome.request.request_id}: {unknown} had a vote and were not named")
    return problems


def _counts(outcome: Outcome, metrics: GenerationMetrics) -> Iterable[str]:
    positions, accepted = metrics.num_accepted_tokens_per_position, metrics.num_accepted_tokens
    if sum(positions) != accepted or list(positions) != sorted(positions, reverse=True):
        yield f"{accepted} accepted, by position {positions}"
    if not 0 <= accepted <= metrics.num_draft_tokens:
        yield f"{accepted} accepted of {metrics.num_draft_tokens}"
    # The opening's token, then per round what was accepted and one next token, which the last round may lack.
    without_last = 1 + accepted + metrics.num_rounds - 1
    if len(outcome.token_ids) not in ((without_last, without_last + 1) if metrics.num_rounds else (1,)):
        yield f"{len(outcome.token_ids)} tokens of {metrics.num_rounds} rounds, {accepted} of them accepted"
    if metrics.num_output_tokens != len(outcome.token_ids):
        yield f"{metrics.num_output_tokens} tokens counted, {len(outcome.token_ids)} sent"
    if metrics.num_prompt_tokens != len(outcome.request.prompt_token_ids):
        yield f"{metrics.num_prompt_tokens} prompt tokens counted"
    if not 0 <= metrics.num_cached_tokens < metrics.num_prompt_tokens:
        yield f"{metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens cached"
    most = outcome.request.num_speculative_tokens
    if most is not None and len(positions) > most:
        yield f"accepted at positions {positions}, asked for {most}"
    for drafter_id, one in metrics.drafters.items():
        if not 0 <= one.num_accepted_tokens <= one.num_proposed_tokens or one.num_votes_won > metrics.num_rounds:
            yield f"{drafter_id} has counts {one}"
    if not all(0 <= id_ < VOCAB_SIZE for id_ in outcome.token_ids):
        yield "an id outside the vocabulary"


def check_counters(metrics: Metrics, outcomes: Sequence[Outcome]) -> list[str]:
    """The router's counters against the sums of what its requests were told."""
    told = [outcome.last.metrics for outcome in outcomes if outcome.last is not None and outcome.last.metrics]
    wanted = {
        "rounds": sum(one.num_rounds for one in told),
        "draft_tokens": sum(one.num_draft_tokens for one in told),
        "accepted_tokens": sum(one.num_accepted_tokens for one in told),
        "accepted_tokens_per_position": sum(one.num_accepted_tokens for one in told),
        "prompt_tokens": sum(one.num_prompt_tokens for one in told),
        "generation_tokens": sum(one.num_output_tokens for one in told),
    }
    for name, attribute in (
        ("proposal_tokens", "num_proposed_tokens"),
        ("proposals_accepted_tokens", "num_accepted_tokens"),
        ("votes_won", "num_votes_won"),
    ):
        wanted[name] = sum(getattr(count, attribute) for one in told for count in one.drafters.values())
    counted: dict[str, float] = dict.fromkeys(wanted, 0.0)
    for family in metrics.registry.collect():
        name = family.name.removeprefix("moot_")
        if name in counted:
            counted[name] = sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
    return [
        f"counter {name} is {counted[name]:g}, the requests' sum {wanted[name]}"
        for name in wanted
        if counted[name] != wanted[name]
    ]
