"""The rounds of one request over a recorded text: the router's order of doing things, without its transport.

Plan, ask, vote, verify, advance, then plan the next round, then learn of this one: a router asks before it learns, so
that K knows the rounds before the last. Every decision is a function of moot.core, the same that a router calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.replay.proposals import shortened
from lab.replay.recorded_texts import TargetText
from moot.core.acceptance import walk
from moot.core.generation import Generation
from moot.core.speculation.policy import PoolPolicy, RoundPlan
from moot.core.types import Draft, FinishReason, Proposal, Verification
from moot.core.voting.voting import validate_proposal
from moot.simulation.machine_costs import StepCost

_FOLLOWING = 0.1
"""How fast what is known of a drafter's answers follows them: as in the router's drafter pools."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one drafter proposed after each place of one text, and the seconds that it took for each.

    `is_attached`: in the verifier, so that its answer is there before anybody is asked.
    """

    proposals: Sequence[Sequence[Proposal]]
    seconds: Sequence[float]
    is_attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Simulated time, for policies that look at it. Proposals take what they took when they were recorded: those inside
    the verifier one after the other, then the slowest of the rest. `step` says what verifying costs, and each round
    takes `overhead_s` on top."""

    step: StepCost = field(default_factory=lambda: StepCost.line(0.0368, 0.0004))
    overhead_s: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a router knows of its target and tells its drafters. `width`: proposals that each may make."""

    context_limit: int
    vocab_size: int
    width: int = 1
    clock: Clock = field(default_factory=Clock)


@dataclass(slots=True)
class Played:
    """What came of one text. `seconds`: of its rounds, by the clock, `draft_seconds` of them for drafting; `lengths`:
    rounds by the K they asked for; `skipped`: rounds by the drafter that a cascade did not ask."""

    text: TargetText
    generation: Generation
    seconds: float = 0.0
    draft_seconds: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


class Waits:
    """Seconds that the answers of each drafter have lately taken, over all requests, as a router follows them."""

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}

    def of(self, drafter_id: str) -> float | None:
        return self._usual.get(drafter_id)

    def note(self, drafter_id: str, seconds: float) -> None:
        usual = self._usual.get(drafter_id, seconds)
        self._usual[drafter_id] = usual + _FOLLOWING * (seconds - usual)


def play(
    text: TargetText, said: Mapping[str, Said], pool: PoolPolicy, setting: Setting, waits: Waits | None = None
) -> Played:
    """One request from its opening to its end. `said`: by drafter id. `waits`: what is known of earlier requests."""
    waits = Waits() if waits is None else waits
    generation = Generation(text.prompt_token_ids, text.params)
    policy = pool.open(list(said))
    played = Played(text, generation)
    generation.open(_verification(text, generation, Draft(), 0.0))
    plan = policy.plan(generation, setting.context_limit) if not generation.is_finished else RoundPlan(0, 0)
    while not generation.is_finished:
        place = len(generation.output_token_ids) - 1
        chosen = policy.choose(list(said)) if plan.num_speculative_tokens > 0 else []
        # Who answers at once, or hardly later, is heard before it is decided whether the others are asked.
        expensive = {id_ for id_ in chosen if not said[id_].is_attached and policy.is_expensive(waits.of(id_))}
        asked = {drafter_id: said[drafter_id] for drafter_id in chosen if drafter_id not in expensive}
        proposals = _ask(asked, place, plan.num_speculative_tokens, setting)
        if expensive and policy.is_sure(plan, proposals):
            for drafter_id in expensive:
                played.skipped[drafter_id] = played.skipped.get(drafter_id, 0) + 1
        elif expensive:
            asked = {drafter_id: said[drafter_id] for drafter_id in chosen}
            proposals = _ask(asked, place, plan.num_speculative_tokens, setting)
        answers = {drafter_id: one.seconds[place] for drafter_id, one in asked.items()}
        draft_s = _drafting_seconds(asked, answers, waits)
        result = policy.vote(plan, proposals)
        forward_s = setting.clock.step.seconds(1 + len(result.draft), 1)
        verification = _verification(text, generation, result.draft, forward_s)
        verification = generation.advance(verification, result.draft, proposals, result.winner_ids)
        round_s = draft_s + forward_s + setting.clock.overhead_s
        played.seconds += round_s
        played.draft_seconds += draft_s
        played.lengths[plan.num_speculative_tokens] = played.lengths.get(plan.num_speculative_tokens, 0) + 1
        before = plan
        if not generation.is_finished:
            plan = policy.plan(generation, setting.context_limit)
        policy.learn(before, result, verification, draft_s, round_s, answers)
    policy.close()
    return played


def _ask(said: Mapping[str, Said], place: int, num_tokens: int, setting: Setting) -> list[Proposal]:
    heads = [head for one in said.values() for head in shortened(one.proposals[place], num_tokens, setting.width)]
    return [head for head in heads if validate_proposal(head, setting.vocab_size, num_tokens) is None]


def _drafting_seconds(asked: Mapping[str, Said], answers: Mapping[str, float], waits: Waits) -> float:
    for drafter_id, seconds in answers.items():
        waits.note(drafter_id, seconds)
    attached = sum(seconds for drafter_id, seconds in answers.items() if asked[drafter_id].is_attached)
    others = (seconds for drafter_id, seconds in answers.items() if not asked[drafter_id].is_attached)
    return attached + max(others, default=0.0)


def _verification(text: TargetText, generation: Generation, draft: Draft, forward_s: float) -> Verification:
    """What the target makes of `draft`: its text goes on as it was recorded."""
    output, done = text.output_token_ids, len(generation.output_token_ids)
    stops = text.finish_reason is FinishReason.STOP
    walked = walk(
        draft,
        lambda node, path: output[done + len(path)],
        lambda token, number: stops and done + number == len(output),
        generation.num_remaining if stops else len(output) - done,
    )
    return Verification(
        generation.base_length,
        walked.num_accepted,
        walked.output_token_ids,
        walked.finish,
        forward_us=round(forward_s * 1e6),
        batch_requests=1,
        batch_tokens=1 + len(draft),
    )
