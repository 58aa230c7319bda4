"""One request's dealings with its drafters: whom a round asks, what it waits for, what it learns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moot.core.generation import Advance, Generation
from moot.core.request_policy import Plan, RequestPolicy
from moot.core.types import Proposal, Verification
from moot.core.voting import VoteResult, validate_proposal
from moot.proposers.options import MAX_VOCAB_SIZE
from services.router.inside import Inside, InsideSource
from services.router.ports import BallotBox, Drafter, DrafterSource, Prefix

if TYPE_CHECKING:
    from services.router.electorate import Electorate

MIN_DRAFTING_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BallotPolicy:
    """How long a round waits for proposals. Seconds, from the moment the drafters are asked."""

    soft_deadline_s: float = 0.05
    hard_deadline_s: float = 0.25
    quorum: float = 0.5
    """Share of the drafters asked that suffices once the soft deadline has passed, 0 to 1."""
    width: int = 1
    """Proposals that a drafter may make at most."""
    num_top_candidates: int = 8
    """Asked of the verifier where a drafter of the request lives from them."""


class Voters:
    """One request's drafters and its policy: plan, ask, collect, vote, learn, end."""

    def __init__(
        self,
        electorate: Electorate,
        prefix: Prefix,
        sources: list[DrafterSource],
        policy: RequestPolicy,
        is_adaptive: bool,
        spared: frozenset[str] = frozenset(),
    ) -> None:
        """`spared`: drafters that are left out and not asked in this request at all, while others are."""
        self._electorate = electorate
        self._spared = spared
        self._metrics = electorate.metrics
        self._ballots = electorate.ballots
        self._policy = policy
        self._is_adaptive = is_adaptive
        self._drafters: list[Drafter] = [source.drafter(prefix) for source in sources]
        self._inside = prefix.inside = self._wish([one.drafter_id for one in sources if isinstance(one, InsideSource)])
        self._postponed = 0
        """K of a round that waits for drafters who have not been asked."""
        self._loop = asyncio.get_running_loop()
        self._asked_at = 0.0
        self._last_length: int | None = None
        self._asked: list[str] = []
        self._waited_for: list[str] = []
        """Drafters that the round now drafting has asked, and those that the one collected last had asked."""
        self._answers: dict[str, float | None] = {}
        """Of the round that was collected last: seconds until each answer, None where it missed the vote."""
        self.num_top_candidates = 0
        # Not of a request that opens while hardly any round drafts: finding them lengthens a full step.
        if not self._hardly_drafts and any(source.wants_top_candidates for source in sources):
            self.num_top_candidates = self._ballots.num_top_candidates

    def prepare(self) -> None:
        """Have the drafters read the prompt while the verifier does, unless hardly any round drafts: then a saturated
        machine is spared their work. A drafter that is asked unprepared reads the prompt first."""
        if self._hardly_drafts:
            return
        for drafter in self._drafters:
            if drafter.drafter_id not in self._spared:
                drafter.prepare()

    def plan(self, generation: Generation, context_limit: int, max_draft_tokens: int) -> Plan:
        """What the next round may spend; `max_draft_tokens`: what the verifier takes."""
        if self._electorate.is_shedding():
            return self._plain()
        plan = self._policy.plan(generation, context_limit, at_least=self._postponed)
        length = plan.num_speculative_tokens
        if self._is_adaptive:
            self._electorate.note_round(length > 0)
        # What the end of the text cuts is no choice.
        if length < generation.num_remaining - 1 and self._last_length not in (None, length):
            self._metrics.speculation_length_changes.inc()
        self._last_length = length
        if not self._drafters or self._postpones(length):
            return Plan(0, 0)
        if plan.max_draft_tokens > max_draft_tokens:
            return Plan(plan.num_speculative_tokens, max_draft_tokens, plan.value)
        return plan

    def _plain(self) -> Plan:
        """A round of plain decoding, which says nothing of the policy's choices."""
        self._postponed = 0
        if self._inside is not None:
            self._inside.num_tokens = 0
        return Plan(0, 0)

    def ask(self, plan: Plan) -> BallotBox:
        """Ask the drafters; the answers come into the box. Dear ones only where those that have answered by then, which
        takes no time, are not sure."""
        self._asked_at = self._loop.time()
        self._asked = []
        ballots = self._ballots
        box = BallotBox(
            self._loop, soft_s=ballots.soft_deadline_s, hard_s=ballots.hard_deadline_s, quorum=ballots.quorum
        )
        if plan.num_speculative_tokens:
            chosen = self._chosen()
            dear = [drafter for drafter in chosen if self._policy.is_dear(drafter.answer_seconds)]
            self._put(box, plan, [drafter for drafter in chosen if drafter not in dear])
            if dear and not self._policy.is_sure(plan, self._cast_so_far(box, plan)):
                self._put(box, plan, dear)
            else:
                self._metrics.asks_spared.inc(len(dear))
        return box

    def _put(self, box: BallotBox, plan: Plan, drafters: list[Drafter]) -> None:
        for drafter in drafters:
            if drafter.ask(box, plan.num_speculative_tokens, self._ballots.width):
                self._asked.append(drafter.drafter_id)

    def _chosen(self) -> list[Drafter]:
        """Whom this round asks."""
        candidates = [drafter.drafter_id for drafter in self._drafters]
        if self._spared:
            # One that has come back meanwhile is asked again.
            spared = self._spared & self._electorate.policy.panel.left_out.keys()
            candidates = [one for one in candidates if one not in spared] or candidates
        chosen = self._policy.choose(candidates)
        return (
            self._drafters
            if len(chosen) == len(self._drafters)
            else [drafter for drafter in self._drafters if drafter.drafter_id in chosen]
        )

    def _cast_so_far(self, box: BallotBox, plan: Plan) -> list[Proposal]:
        return [
            proposal
            for _, proposals in box.proposals
            for proposal in proposals
            if validate_proposal(proposal, MAX_VOCAB_SIZE, plan.num_speculative_tokens) is None
        ]

    async def collect(self, box: BallotBox, plan: Plan, vocab_size: int) -> list[Proposal]:
        """The proposals that may vote, once the box has closed; every other one is dropped and counted."""
        missed = await box.close()
        self._waited_for = self._asked
        self._answers = {drafter_id: at - self._asked_at for drafter_id, at in box.answered_at.items()}
        for drafter in missed:
            self._answers[drafter.drafter_id] = None
            drafter.missed()
        valid: list[Proposal] = []
        for drafter, proposals in box.proposals:
            reason = "too_many" if len(proposals) > self._ballots.width else None
            for proposal in proposals[: self._ballots.width]:
                fault = validate_proposal(proposal, vocab_size, plan.num_speculative_tokens)
                if fault is None:
                    valid.append(proposal)
                reason = reason or fault
            if reason is None:
                drafter.answered()
            else:
                drafter.malformed(reason)
        return valid

    def vote(self, plan: Plan, proposals: list[Proposal], verifier_id: str) -> VoteResult:
        """One draft, out of the budget of the verifier that it goes to."""
        result = self._policy.vote(plan, proposals, verifier_id)
        metrics = self._metrics
        metrics.speculation_length.observe(plan.num_speculative_tokens)
        if result.agreement_ratio is not None:
            metrics.vote_agreement_ratio.observe(result.agreement_ratio)
        return result

    @property
    def draft_seconds(self) -> float:
        """Since the drafters were asked."""
        return self._loop.time() - self._asked_at

    def learn(
        self,
        plan: Plan,
        result: VoteResult,
        advance: Advance,
        verification: Verification,
        draft_seconds: float,
        round_seconds: float,
        own_seconds: float,
    ) -> None:
        """Two durations from asking the drafters: to the vote, and to the answer's commit; and how long this process
        was busy with the round."""
        # Drafting inside the verifier was asked for by this plan, too, and is paid by this round.
        draft_seconds += verification.inside_us * 1e-6
        times = (draft_seconds, round_seconds, self._answers, own_seconds)
        self._policy.learn(plan, result, advance, verification, *times)
        if not self._electorate.gone.isdisjoint(self._waited_for):
            # It went while this round waited for it, which no other will.
            self._electorate.policy.draft_cost.forget()
        self._electorate.publish_panel()

    def hear_inside(self, verification: Verification) -> None:
        """What drafters inside the verifier propose for the next round has come with its answer."""
        if self._inside is not None:
            self._inside.hear(verification)

    def end(self, *, aborted: bool) -> None:
        for drafter in self._drafters:
            drafter.end(aborted=aborted)
        self._policy.close()
        self._electorate.publish_weights()

    def _wish(self, drafter_ids: list[str]) -> Inside | None:
        """What is asked with the opening, before there is a plan; None without a drafter inside the verifier."""
        if not drafter_ids:
            return None
        return Inside(tuple(drafter_ids), self._ballots.width, 0 if self._hardly_drafts else self._policy.most)

    @property
    def _hardly_drafts(self) -> bool:
        electorate = self._electorate
        return electorate.is_shedding() or (self._is_adaptive and electorate.drafting_share < MIN_DRAFTING_SHARE)

    def _postpones(self, length: int) -> bool:
        """Whether a round that may draft `length` tokens waits for the next one, because drafters inside the verifier
        would have no part in it. It is a probe: judged without them they would never be tried. Wishes for the next."""
        inside = self._inside
        if inside is None:
            return False
        was_asked, inside.num_tokens = inside.num_tokens > 0, length
        self._postponed = 0 if was_asked else length
        return self._postponed > 0
