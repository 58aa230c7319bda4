"""The drafter set: the drafters that may vote for requests, and what one request does with them.

`DrafterSet` holds all drafters of a router and what is known of each; priors say what drafters weigh in the vote before
anything is known of them. `RequestDrafters` belongs to one request: which drafters a round asks, what it waits for,
what it learns.

Drafters attached to the verifier are asked with every command and answered with every answer (`AttachedSource`). What
they propose for a round has come with the answer before it, so asking them costs no time and no message. A wish is a
round ahead of its plan: it asks for as many tokens as the round under way was given.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moot.core.errors import ConfigError, InvalidRequest
from moot.core.generation import Generation
from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.policy import PoolPolicy, RequestPolicy, RoundPlan
from moot.core.types import Proposal, Verification
from moot.core.voting.voting import VoteResult, validate_proposal
from moot.drafters.interface import MAX_VOCAB_SIZE
from moot.runtime.metrics import Metrics
from services.router.generation.ports import (
    AttachedState,
    DrafterSource,
    Prefix,
    ProposalCollector,
    RequestDrafter,
    known_ids,
)

_log = logging.getLogger("moot.router.drafters")


class AttachedRequestDrafter:
    """One attached drafter, the `RequestDrafter` port of one request: it has been asked already, and casts what
    came."""

    __slots__ = ("_metrics", "_prefix", "drafter_id")

    def __init__(self, drafter_id: str, prefix: Prefix, metrics: Metrics) -> None:
        self.drafter_id = drafter_id
        self._prefix = prefix
        self._metrics = metrics

    def prepare(self) -> None:
        """Nothing to prepare: its verifier reads the prompt."""

    def ask(self, box: ProposalCollector, num_speculative_tokens: int, width: int) -> bool:
        attached = self._prefix.attached
        # After a move, or from a verifier without it, there is nothing for this place.
        if attached is None or attached.base_length != len(self._prefix):
            return False
        length = num_speculative_tokens
        # They were made before K was known.
        own = tuple(
            one if len(one.token_ids) <= length else one.part(0, length)
            for one in attached.proposals
            if one.drafter_id == self.drafter_id
        )
        if not own:
            return False
        box.expect(self)
        box.cast(self, own)
        return True

    @property
    def answer_seconds(self) -> float:
        return 0.0

    def missed(self) -> None:
        """Cannot be: it answers at once."""

    def answered(self) -> None:
        """Nothing to note: it answers at once."""

    def malformed(self, reason: str) -> None:
        self._metrics.proposals_dropped.labels(self.drafter_id, reason).inc()

    def end(self, *, aborted: bool) -> None:
        """Nothing to end: the verifier's session ends with the request."""


@dataclass(frozen=True, slots=True)
class AttachedSource:
    """One attached drafter, held by verifiers that have said so. Same interface as a pool of replicas."""

    drafter_id: str
    metrics: Metrics
    wants_top_candidates: bool = False

    def serves(self, prefix: Prefix) -> bool:
        return True

    def drafter(self, prefix: Prefix) -> AttachedRequestDrafter:
        return AttachedRequestDrafter(self.drafter_id, prefix, self.metrics)


def parse_priors(entries: Iterable[str]) -> dict[str, float]:
    """`id=number` entries by drafter id, whether there is such a drafter yet or not. Raises ConfigError naming the bad
    one."""
    priors: dict[str, float] = {}
    for entry in entries:
        drafter_id, _, text = entry.rpartition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not drafter_id or not (0 < number < math.inf):
            raise ConfigError(f"--drafter-priors: {entry!r} is not id=number, above 0 and finite")
        if drafter_id in priors:
            raise ConfigError(f"--drafter-priors: {drafter_id} is named twice")
        priors[drafter_id] = number
    return priors


MIN_DRAFTING_SHARE = 0.1


class RequestDrafters:
    """One request's drafters and its policy: plan, ask, collect, vote, learn, end."""

    def __init__(
        self,
        drafter_set: DrafterSet,
        prefix: Prefix,
        sources: list[DrafterSource],
        policy: RequestPolicy,
        is_adaptive: bool,
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        """`skipped`: drafters that are left out and not asked in this request at all, while others are."""
        self._drafter_set = drafter_set
        self._skipped = skipped
        self._metrics = drafter_set.metrics
        self._tries = drafter_set.tries
        self._policy = policy
        self._is_adaptive = is_adaptive
        self._drafters: list[RequestDrafter] = [source.drafter(prefix) for source in sources]
        self._attached = prefix.attached = self._wish(
            [one.drafter_id for one in sources if isinstance(one, AttachedSource)]
        )
        self._postponed = 0
        """K of a round that waits for drafters that have not been asked."""
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
            self.num_top_candidates = self._tries.num_top_candidates

    def prepare(self) -> None:
        """Have the drafters read the prompt while the verifier does, unless hardly any round drafts: a saturated
        machine then does without their work. A drafter that is asked unprepared reads the prompt first."""
        if self._hardly_drafts:
            return
        for drafter in self._drafters:
            if drafter.drafter_id not in self._skipped:
                drafter.prepare()

    def plan(self, generation: Generation, context_limit: int, max_draft_tokens: int) -> RoundPlan:
        """What the next round may spend; `max_draft_tokens`: what the verifier takes."""
        if self._drafter_set.is_shedding():
            return self._plain()
        plan = self._policy.plan(generation, context_limit, at_least=self._postponed)
        length = plan.num_speculative_tokens
        if self._is_adaptive:
            self._drafter_set.note_round(length > 0)
        # What the end of the text cuts is no choice.
        if length < generation.num_remaining - 1 and self._last_length not in (None, length):
            self._metrics.speculation_length_changes.inc()
        self._last_length = length
        if not self._drafters or self._postpones(length):
            return RoundPlan(0, 0)
        if plan.max_draft_tokens > max_draft_tokens:
            return RoundPlan(plan.num_speculative_tokens, max_draft_tokens, plan.value)
        return plan

    def _plain(self) -> RoundPlan:
        """A round of plain decoding, which says nothing of the policy's choices."""
        self._postponed = 0
        if self._attached is not None:
            self._attached.num_tokens = 0
        return RoundPlan(0, 0)

    def ask(self, plan: RoundPlan) -> ProposalCollector:
        """Ask the drafters; the answers come into the box. Expensive drafters are asked only where those that have
        answered by then, which takes no time, are not sure."""
        self._asked_at = self._loop.time()
        self._asked = []
        tries = self._tries
        box = ProposalCollector(
            self._loop, soft_s=tries.soft_deadline_s, hard_s=tries.hard_deadline_s, quorum=tries.quorum
        )
        if plan.num_speculative_tokens:
            chosen = self._chosen()
            expensive = [drafter for drafter in chosen if self._policy.is_expensive(drafter.answer_seconds)]
            self._put(box, plan, [drafter for drafter in chosen if drafter not in expensive])
            if expensive and not self._policy.is_sure(plan, self._cast_so_far(box, plan)):
                self._put(box, plan, expensive)
            else:
                self._metrics.drafter_calls_skipped.inc(len(expensive))
        return box

    def _put(self, box: ProposalCollector, plan: RoundPlan, drafters: list[RequestDrafter]) -> None:
        for drafter in drafters:
            if drafter.ask(box, plan.num_speculative_tokens, self._tries.width):
                self._asked.append(drafter.drafter_id)

    def _chosen(self) -> list[RequestDrafter]:
        """The drafters that this round asks."""
        candidates = [drafter.drafter_id for drafter in self._drafters]
        if self._skipped:
            # One that has come back meanwhile is asked again.
            skipped = self._skipped & self._drafter_set.policy.selection.left_out.keys()
            candidates = [one for one in candidates if one not in skipped] or candidates
        chosen = self._policy.choose(candidates)
        return (
            self._drafters
            if len(chosen) == len(self._drafters)
            else [drafter for drafter in self._drafters if drafter.drafter_id in chosen]
        )

    def _cast_so_far(self, box: ProposalCollector, plan: RoundPlan) -> list[Proposal]:
        return [
            proposal
            for _, proposals in box.proposals
            for proposal in proposals
            if validate_proposal(proposal, MAX_VOCAB_SIZE, plan.num_speculative_tokens) is None
        ]

    async def collect(self, box: ProposalCollector, plan: RoundPlan, vocab_size: int) -> list[Proposal]:
        """The proposals that may vote, once the box has closed; every other one is dropped and counted."""
        missed = await box.close()
        self._waited_for = self._asked
        self._answers = {drafter_id: at - self._asked_at for drafter_id, at in box.answered_at.items()}
        for drafter in missed:
            self._answers[drafter.drafter_id] = None
            drafter.missed()
        valid: list[Proposal] = []
        for drafter, proposals in box.proposals:
            reason = "too_many" if len(proposals) > self._tries.width else None
            for proposal in proposals[: self._tries.width]:
                fault = validate_proposal(proposal, vocab_size, plan.num_speculative_tokens)
                if fault is None:
                    valid.append(proposal)
                reason = reason or fault
            if reason is None:
                drafter.answered()
            else:
                drafter.malformed(reason)
        return valid

    def vote(self, plan: RoundPlan, proposals: list[Proposal], verifier_id: str) -> VoteResult:
        """One draft, out of the budget of the verifier that it goes to."""
        result = self._policy.vote(plan, proposals, verifier_id)
        metrics = self._metrics
        metrics.speculation_length.observe(plan.num_speculative_tokens)
        if result.agreement_ratio is not None:
            metrics.vote_agreement_ratio.observe(result.agreement_ratio)
        return result

    @property
    def draft_seconds(self) -> float:
        """Seconds since the drafters were asked."""
        return self._loop.time() - self._asked_at

    def learn(
        self,
        plan: RoundPlan,
        result: VoteResult,
        verification: Verification,
        draft_seconds: float,
        round_seconds: float,
        own_seconds: float,
    ) -> None:
        """Learn from a round: two durations from asking the drafters, to the vote and to the answer's commit; and how
        long this process was busy with the round."""
        # Drafting by attached drafters was asked for by this plan, too, and is paid by this round.
        draft_seconds += verification.inside_us * 1e-6
        times = (draft_seconds, round_seconds, self._answers, own_seconds)
        self._policy.learn(plan, result, verification, *times)
        if not self._drafter_set.gone.isdisjoint(self._waited_for):
            # It went while this round waited for it, which no other will.
            self._drafter_set.policy.draft_cost.forget()
        self._drafter_set.publish_selection()

    def hear_attached(self, verification: Verification) -> None:
        """Take what drafters attached to the verifier propose for the next round: it has come with the verifier's
        answer."""
        if self._attached is not None:
            self._attached.hear(verification)

    def end(self, *, aborted: bool) -> None:
        for drafter in self._drafters:
            drafter.end(aborted=aborted)
        self._policy.close()
        self._drafter_set.publish_weights()

    def _wish(self, drafter_ids: list[str]) -> AttachedState | None:
        """The wish that goes with the opening, before there is a plan; None without an attached drafter."""
        if not drafter_ids:
            return None
        return AttachedState(tuple(drafter_ids), self._tries.width, 0 if self._hardly_drafts else self._policy.most)

    @property
    def _hardly_drafts(self) -> bool:
        drafter_set = self._drafter_set
        return drafter_set.is_shedding() or (self._is_adaptive and drafter_set.drafting_share < MIN_DRAFTING_SHARE)

    def _postpones(self, length: int) -> bool:
        """Whether a round that may draft `length` tokens waits for the next one, because drafters attached to the
        verifier would have no part in it. It is a probe: judged without them they would never be tried. Sets the wish
        for the next round."""
        attached = self._attached
        if attached is None:
            return False
        was_asked, attached.num_tokens = attached.num_tokens > 0, length
        self._postponed = 0 if was_asked else length
        return self._postponed > 0


DRAFTING_ROUNDS = 50
TRIED_IN = 4
"""Of so many requests one prepares drafters that are left out, so that they may be tried in it: reading every prompt
for nothing takes a machine's cores from the others."""


class DrafterSet:
    """The drafter set of this router: all its drafters. `sources` may change while requests run; a request keeps those
    it started with."""

    def __init__(self, policy: PoolPolicy, tries: CollectionPolicy, metrics: Metrics) -> None:
        self.policy = policy
        self.tries = tries
        self.metrics = metrics
        self.sources: dict[str, DrafterSource] = {}
        self._left_out: dict[str, str] = {}
        self._num_selection_changes = 0
        self._available: frozenset[str] = frozenset()
        self.gone: frozenset[str] = frozenset()
        """Drafters in other processes that could be asked once and cannot now."""
        self._num_opened = 0
        self.is_shedding: Callable[[], bool] = lambda: False
        """Whether no round should draft: everything that is computed is needed for the requests that wait."""
        self.drafting_share = 1.0
        """Of late, the part of the rounds whose K is left to the policy that drafted; fading."""

    @property
    def drafter_ids(self) -> frozenset[str]:
        return frozenset(self.sources)

    def open(
        self, prefix: Prefix, names: tuple[str, ...] | None, num_speculative_tokens: int | None
    ) -> RequestDrafters:
        """The drafters of one request. Raises InvalidRequest for a name that there is not."""
        if names is None:
            chosen = list(self.sources.values())
        else:
            unknown = sorted(set(names) - set(self.sources))
            if unknown:
                raise InvalidRequest(
                    f"no drafter {', '.join(unknown)}; there is {known_ids(self.sources.values())}", "drafters"
                )
            chosen = [self.sources[name] for name in dict.fromkeys(names)]
        chosen = [source for source in chosen if num_speculative_tokens != 0 and source.serves(prefix)]
        drafter_ids = [source.drafter_id for source in chosen]
        policy = self.policy.open(drafter_ids, num_speculative_tokens, is_chosen=names is not None)
        skipped = frozenset[str]() if names is not None else self._skipped(drafter_ids)
        return RequestDrafters(self, prefix, chosen, policy, num_speculative_tokens is None, skipped)

    def _skipped(self, drafter_ids: list[str]) -> frozenset[str]:
        """The next request's drafters that are left out and not even tried in it."""
        left_out = self.policy.selection.left_out.keys() & drafter_ids
        if not left_out or len(left_out) == len(drafter_ids):
            return frozenset()
        self._num_opened += 1
        return frozenset() if self._num_opened % TRIED_IN == 0 else frozenset(left_out)

    def note_available(self, drafter_ids: Iterable[str]) -> None:
        """Note which drafters in other processes can be asked now. Where one has gone, or is ejected, rounds wait for
        others: what drafting took with it would keep rounds from drafting without it."""
        before, self._available = self._available, frozenset(drafter_ids)
        self.gone = (self.gone | before) - self._available
        if before - self._available:
            self.policy.draft_cost.forget()

    def admit_attached(self, drafter_id: str, family: str) -> None:
        """Add an attached drafter that a verifier has said it holds. It stays known when that verifier goes: others may
        hold it."""
        if not isinstance(self.sources.get(drafter_id), AttachedSource | None):
            _log.warning("attached drafter has the id of another", extra={"drafter": drafter_id})
            return
        self.policy.admit(drafter_id, family)
        # The wish for it is made before it is known which drafters the round asks.
        self.policy.selection.exempt.add(drafter_id)
        self.sources[drafter_id] = AttachedSource(drafter_id, self.metrics)

    def note_round(self, has_drafted: bool) -> None:
        self.drafting_share += (has_drafted - self.drafting_share) / DRAFTING_ROUNDS

    def publish_selection(self) -> None:
        """Publish which drafters rounds do not ask any more, and why, where that has changed."""
        selection, gauge = self.policy.selection, self.metrics.drafters_left_out
        if selection.num_changes == self._num_selection_changes:
            return
        self._num_selection_changes = selection.num_changes
        before, self._left_out = self._left_out, dict(selection.left_out)
        for drafter_id, reason in before.items():
            if self._left_out.get(drafter_id) != reason:
                gauge.labels(drafter_id, reason).set(0)
        for drafter_id, reason in self._left_out.items():
            if before.get(drafter_id) != reason:
                gauge.labels(drafter_id, reason).set(1)
        _log.info(
            "drafter selection changed",
            extra={"left_out": ", ".join(f"{one}: {why}" for one, why in self._left_out.items())},
        )

    def publish_weights(self) -> None:
        """Publish the weights that the next request starts from."""
        for drafter_id, weight in self.policy.pool_weights.numbers.items():
            self.metrics.drafter_weight.labels(drafter_id).set(weight)
