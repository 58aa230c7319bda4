"""The speculation policy of a router and of each of its requests: vote, shape, weights, tables, length, selection.

`make_policy` makes the policy of a router, with the tables that serve all its requests; `PoolPolicy.open` makes the
part that belongs to one request. A round reads: plan, (ask the drafters), vote, (verify, advance), learn. What a
committed round says about its proposals (which tokens were right, and how far each drafter was) goes to both. Nothing
here can change a text, only its speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from moot.core.generation import Generation, num_leading
from moot.core.options import Options, option
from moot.core.speculation.costs import DraftCost, RoundTimes, VerifyCost
from moot.core.speculation.drafter_selection import (
    ALL,
    ALWAYS_ASK,
    PAYING,
    SELECTIONS,
    DrafterAnswer,
    DrafterSelection,
    SelectionRound,
    expected_share,
    is_expensive,
)
from moot.core.speculation.length import (
    LENGTHS,
    Fixed,
    Goodput,
    LengthPolicy,
    Load,
    MinionsLength,
    PositionAcceptance,
    Probes,
    RoundSample,
    bound_length,
)
from moot.core.types import Proposal, Verification
from moot.core.voting.calibration import Calibration, OwnAcceptance, ShareAcceptance
from moot.core.voting.draft_trie import PREFIX, SHAPES, Budget
from moot.core.voting.vote_policy import VotePolicy
from moot.core.voting.voting import POLICIES, VoteResult, vote
from moot.core.voting.weights import WEIGHTS, Contest, PoolWeights, Weights


def learn_trie(
    result: VoteResult,
    token_ids: Sequence[int],
    calibration: Calibration,
    acceptance: ShareAcceptance,
    own: OwnAcceptance | None = None,
) -> None:
    """Score every proposed token whose predecessors were all right against the committed `token_ids`, verified or not.
    `own`: what is learned of this request alone.

    What comes after a wrong token, or after the end of the committed text, says nothing.
    """
    trie, shares = result.trie, result.shares.known()
    tables = [calibration.of(drafter_id) for drafter_id in trie.drafter_ids]
    node = PREFIX
    for depth, token in enumerate(token_ids):
        children = trie.children[node]
        right = children.get(token)
        for child in children.values():
            for drafter, confidence, own_depth in trie.drafters[child]:
                tables[drafter].record(confidence, own_depth, child == right)
        offered = shares.get(node, ())
        if own is not None and offered:
            # Before the pool has learned the answer.
            own.record([share for _, share in offered], depth, right is not None)
        for child, share in offered:
            acceptance.record(share, depth, child == right)
        if right is None:
            return
        node = right


def heard(
    answers: Mapping[str, float | None], proposals: Sequence[Proposal], committed: Verification
) -> dict[str, DrafterAnswer]:
    """Answers of the drafters that were asked: how far one of its proposals was right in a committed round, and when it
    was there.

    `answers`: seconds until each answer, None where it missed the vote.
    """
    accepted = committed.output_token_ids[: committed.num_accepted]
    right = dict.fromkeys(answers, 0)
    for proposal in proposals:
        if proposal.drafter_id in right:
            right[proposal.drafter_id] = max(right[proposal.drafter_id], num_leading(proposal.token_ids, accepted))
    return {drafter_id: DrafterAnswer(right[drafter_id], seconds) for drafter_id, seconds in answers.items()}


_FOLLOWING = 0.2
"""How fast what is known of the load follows the rounds: batches differ in size from step to step."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one round may spend. `num_speculative_tokens` is what every drafter is asked for; 0: draft nothing.

    `value`: seconds that one accepted token saves this request: a node is verified while that pays for the slower step;
    None: every node up to `max_draft_tokens` is.
    """

    num_speculative_tokens: int
    max_draft_tokens: int
    value: float | None = None


class RequestPolicy:
    """The policy of one request. `close` when it ends: its weights flow back into the pool's."""

    def __init__(
        self,
        pool: PoolPolicy,
        weights: Weights,
        length: LengthPolicy,
        most: int,
        is_adaptive: bool,
        selection: DrafterSelection | None = None,
    ) -> None:
        """`most`: the greatest K that `length` comes to. `selection`: None where all are asked."""
        self.most = most
        self._pool = pool
        self._weights = weights
        self._length = length
        self._spends_by_cost = is_adaptive and isinstance(length, Goodput)
        # A request finds the verifier as those before it left it.
        self._load = pool.load
        self._usual = pool.usual
        self._seconds = 0.0
        self._tokens = 0.0
        self._next_base: int | None = None
        self._selection = selection
        self._acceptance = OwnAcceptance(pool.acceptance)
        self._budget: Budget | None = None

    @property
    def weights(self) -> Mapping[str, float]:
        """Per drafter, summing to 1."""
        return self._weights.numbers

    def plan(
        self, generation: Generation, context_limit: int, load: Load | None = None, *, at_least: int = 0
    ) -> RoundPlan:
        """What the next round may spend. `context_limit`: of the target, prompt plus output tokens. `load`: what shares
        the verify step; None: what shared it in the last round. `at_least`: K of an earlier plan that was put off."""
        if load is not None:
            self._load = load
        self._load = replace(self._load, num_own=max(min(self._pool.num_open, self._load.num_requests), 1.0))
        wanted = max(self._length.next_length(self._load), at_least)
        length = bound_length(wanted, generation.base_length, context_limit, generation.num_remaining)
        budget = self._pool.options.max_draft_tokens if length else 0
        if not self._spends_by_cost:
            return RoundPlan(length, budget)
        # Each request's time is worth the same: a token saves more of it where tokens are rare.
        before = round(self._load.num_other_tokens) + 1
        value = self._seconds / self._tokens if self._tokens else self._pool.verify_cost.seconds(before)
        return RoundPlan(length, budget, value)

    def choose(self, drafter_ids: Sequence[str]) -> Sequence[str]:
        """Those of the request's drafters that a round asks. Called once for each round that drafts."""
        return drafter_ids if self._selection is None else self._selection.choose(drafter_ids)

    @property
    def has_cascade(self) -> bool:
        return self._pool.options.cascade < ALWAYS_ASK

    def is_expensive(self, answer_seconds: float | None) -> bool:
        """Whether a drafter whose answers usually take so long is asked only where cheaper ones are not sure."""
        return self.has_cascade and is_expensive(answer_seconds, self._usual.total if self._usual else None)

    def is_sure(self, plan: RoundPlan, proposals: Sequence[Proposal]) -> bool:
        """Whether these proposals make it needless to ask further drafters."""
        pool, length = self._pool, plan.num_speculative_tokens
        return self.has_cascade and expected_share(proposals, pool.calibration, length) >= pool.options.cascade

    def vote(self, plan: RoundPlan, proposals: Sequence[Proposal], verifier_id: str = "") -> VoteResult:
        """One draft out of valid proposals (see voting.validate_proposal), for the next step of this verifier."""
        pool = self._pool
        budget = self._join(verifier_id)

        def spend(probabilities: Sequence[float]) -> int:
            value = plan.value
            values = [inf if value is None else value * probability for probability in probabilities]
            return budget.spend(self, values, max(self._load.num_requests, 1.0))

        return vote(
            proposals,
            self._weights.numbers,
            policy=pool.options.vote,
            shape=pool.options.shape,
            num_speculative_tokens=plan.num_speculative_tokens,
            max_draft_tokens=plan.max_draft_tokens,
            calibration=pool.calibration,
            families=pool.families,
            acceptance=self._acceptance,
            spend=spend,
        )

    def _join(self, verifier_id: str) -> Budget:
        """The budget of the verifier that the request is at now."""
        budget = self._pool.budget(verifier_id)
        if self._budget is not budget:
            if self._budget is not None:
                self._budget.leave(self)
            self._budget = budget
        return budget

    def learn(
        self,
        plan: RoundPlan,
        result: VoteResult,
        verification: Verification,
        draft_seconds: float,
        round_seconds: float | None = None,
        answers: Mapping[str, float | None] | None = None,
        own_seconds: float | None = None,
    ) -> None:
        """Learn from a round; `verification`: as it was committed. `draft_seconds`: from asking the drafters to the
        vote; `round_seconds`: from asking to this moment, None where it is not known. `answers`: per drafter that was
        asked the seconds until its answer, None where it missed the vote; no mapping: not known. `own_seconds`: seconds
        that the router itself was busy with plan, questions, vote and learning of a round; None: not known."""
        pool, token_ids = self._pool, verification.output_token_ids
        if self._next_base is not None and self._next_base != verification.base_length:
            # A session opened again has committed a token that no round has shown to the weights.
            self._weights.finish()
        self._next_base = verification.base_length + len(token_ids)
        learn_trie(result, token_ids, pool.calibration, pool.acceptance, self._acceptance)
        self._weights.observe(
            Contest(
                plan.num_speculative_tokens,
                result.trie.proposals,
                token_ids,
                result.winner_ids,
                len(result.path),
                verification.num_accepted,
            )
        )
        forward_seconds = verification.forward_us * 1e-6
        num_drafted = len(result.draft)
        sample = RoundSample(
            plan.num_speculative_tokens,
            num_drafted,
            verification.num_accepted,
            forward_seconds,
            is_cut=verification.finish_reason is not None,
            num_offered=result.num_offered,
        )
        self._length.observe(sample)
        num_requests = max(verification.batch_requests, 1)
        if verification.batch_prefill_tokens == 0:
            # Prefill is cheaper by the token: its steps would make large drafts look cheap.
            pool.verify_cost.observe(verification.batch_tokens, forward_seconds, 1 / num_requests)
        # What a trial waited for is no usual wait.
        if not pool.selection.is_trial(answers or ()):
            pool.draft_cost.observe(plan.num_speculative_tokens, draft_seconds, 1 / num_requests)
        if own_seconds is not None:
            self._note_own(plan.num_speculative_tokens, own_seconds, 1 / num_requests)
        drafting = draft_seconds if plan.num_speculative_tokens else 0.0
        waiting = verification.queue_us * 1e-6
        # A round that was not timed took what its parts took.
        total = drafting + waiting + forward_seconds if round_seconds is None else round_seconds
        times = RoundTimes(total, drafting, waiting, forward_seconds)
        if self._selection is not None and answers and plan.num_speculative_tokens:
            answered = heard(answers, result.trie.proposals, verification)
            done = SelectionRound(answered, verification.num_accepted, len(token_ids), draft_seconds, total)
            if self._selection.learn(done, num_requests):
                # Others are waited for from now on.
                pool.draft_cost.forget()
        pool.usual = times if pool.usual is None else pool.usual.moved(times, _FOLLOWING / num_requests)
        usual = self._usual = pool.usual if self._usual is None else self._usual.moved(times, _FOLLOWING)
        self._load = self._load.moved(verification, num_drafted, usual, _FOLLOWING)
        pool.load = self._load
        self._seconds = 0.9 * self._seconds + draft_seconds + forward_seconds
        self._tokens = 0.9 * self._tokens + len(token_ids)

    def _note_own(self, length: int, seconds: float, weight: float) -> None:
        pool = self._pool
        if length == 0:
            pool.plain_seconds += (_FOLLOWING * weight if pool.plain_seconds else 1.0) * (seconds - pool.plain_seconds)
        pool.router_cost.observe(length, max(seconds - pool.plain_seconds, 0.0), weight)

    def close(self) -> None:
        """The request has ended, for whatever reason."""
        self._pool.num_open -= 1
        if self._budget is not None:
            self._budget.leave(self)
        self._weights.finish()
        self._pool.pool_weights.flow_back(self._weights.numbers)


_UNCALIBRATED_SCALE = 0.6
"""First guess of the acceptance of a token that all drafters agree on, where shares only count heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions(Options):
    """The options of the speculation policy: policies by name, and numbers."""

    vote: str = option(
        "calibrated", help="policy by which the drafters' proposals become one path", choices=tuple(POLICIES)
    )
    shape: str = option(
        "tree", help="shape of the draft: the voted path, its siblings too, or a tree", choices=tuple(SHAPES)
    )
    weights: str = option("hedge", help="policy by which a drafter's weight moves", choices=tuple(WEIGHTS))
    length: str = option("goodput", help="policy that chooses K, the tokens asked of each drafter", choices=LENGTHS)
    cascade: float = option(
        ALWAYS_ASK,
        help="part of K that the best proposal of cheap drafters must be expected to bring for expensive drafters "
        "not to be asked in a round; 1: they always are",
        minimum=0,
        maximum=ALWAYS_ASK,
    )
    asks: str = option(
        PAYING,
        help="drafters that rounds ask: those that bring more than waiting for them costs, or all",
        choices=SELECTIONS,
    )
    num_speculative_tokens: int = option(
        8, help="greatest K, the tokens asked of each drafter; 0: no drafting at all", minimum=0
    )
    max_draft_tokens: int = option(16, help="most tokens of one draft, all branches of a tree together", minimum=0)


@dataclass(slots=True)
class PoolPolicy:
    """The policy of one router, with the tables that serve all its requests."""

    options: SpeculationOptions
    families: dict[str, str]
    calibration: Calibration
    acceptance: ShareAcceptance
    positions: PositionAcceptance
    probes: Probes = field(default_factory=Probes)
    pool_weights: PoolWeights = field(default_factory=PoolWeights)
    verify_cost: VerifyCost = field(default_factory=VerifyCost)
    draft_cost: DraftCost = field(default_factory=DraftCost)
    router_cost: DraftCost = field(default_factory=DraftCost)
    """What a round that drafts takes of the router's own time more than one that does not."""
    plain_seconds: float = 0.0
    """Of that time, what a round takes that does not; a running mean."""
    num_open: int = 0
    """Requests."""
    budgets: dict[str, Budget] = field(default_factory=dict)
    """Per verifier."""
    load: Load = field(default_factory=Load)
    """What the latest round has seen."""
    usual: RoundTimes | None = None
    selection: DrafterSelection = field(default_factory=DrafterSelection)
    minions: MinionsLength | None = None
    """The length of all requests, where the policy is that."""
    price: float = 0.0
    """Chance that a further row of a verifier's latest step would have had to have."""

    def open(
        self, drafter_ids: Sequence[str], num_speculative_tokens: int | None = None, *, is_chosen: bool = False
    ) -> RequestPolicy:
        """The policy of one request with this drafter set.

        `num_speculative_tokens`: 0 for no drafting, n for always n (not above the pool's), None for the length policy.
        `is_chosen`: the request has named its drafters; then all of them are asked.
        """
        weights = WEIGHTS[self.options.weights](self.pool_weights.start(drafter_ids))
        length, most = self._length(num_speculative_tokens), self.options.num_speculative_tokens
        if num_speculative_tokens is not None:
            most = min(max(num_speculative_tokens, 0), most)
        selection = None if is_chosen or self.options.asks == ALL else self.selection
        self.num_open += 1
        return RequestPolicy(self, weights, length, most, num_speculative_tokens is None, selection)

    def _length(self, asked: int | None) -> LengthPolicy:
        most = self.options.num_speculative_tokens
        if asked is not None:
            return Fixed(min(max(asked, 0), most))
        if self.options.length == "goodput" and most > 0:
            costs = (self.verify_cost, self.draft_cost)
            return Goodput(most, *costs, self.positions, self.probes, router_cost=self.router_cost)
        if self.options.length == "minions" and most > 0:
            if self.minions is None:
                self.minions = MinionsLength(min(4, most), most)
            return self.minions
        return Fixed(most)

    def vote_policy(self, number: int, drafter_ids: Sequence[str]) -> VotePolicy:
        """The vote as it is now, for verifiers that hold it over the proposals of their own drafters too.

        `drafter_ids`: all whose proposals may take part.
        """
        options = self.options
        return VotePolicy(
            number,
            options.vote,
            options.shape,
            options.num_speculative_tokens,
            options.max_draft_tokens,
            self.pool_weights.start(drafter_ids),
            dict(self.families),
            {drafter_id: self.calibration.of(drafter_id).fixed() for drafter_id in drafter_ids},
            self.acceptance.fixed(),
        )

    def budget(self, verifier_id: str) -> Budget:
        """The budget of this verifier; budgets that no request shares are dropped."""
        found = self.budgets.get(verifier_id)
        if found is None:
            self.budgets = {one: budget for one, budget in self.budgets.items() if len(budget)}
            found = self.budgets[verifier_id] = Budget(self._step_seconds)
        return found

    def _step_seconds(self, num_tokens: int) -> float:
        return self.verify_cost.seconds(num_tokens)

    def admit(self, drafter_id: str, family: str = "") -> None:
        """A drafter has been found. Drafters of one `family` are alike; none: it is a family of its own."""
        if family:
            self.families[drafter_id] = family

    def forget(self, drafter_id: str) -> None:
        """A drafter is gone for good, or another model stands behind its name now: drop what was learned of it."""
        self.families.pop(drafter_id, None)
        self.calibration.forget(drafter_id)
        self.pool_weights.forget(drafter_id)
        self.selection.forget(drafter_id)


def make_policy(
    options: SpeculationOptions | None = None,
    *,
    families: Mapping[str, str] | None = None,
    priors: Mapping[str, float] | None = None,
) -> PoolPolicy:
    """A bundle, by default with the defaults of all options. `families`: drafter id to family; `priors`: drafter id to
    the weight it starts with, 1 for all others."""
    options = options or SpeculationOptions()
    return PoolPolicy(
        options,
        families=dict(families or {}),
        calibration=Calibration(),
        acceptance=ShareAcceptance(1.0 if options.vote == "calibrated" else _UNCALIBRATED_SCALE),
        positions=PositionAcceptance(options.num_speculative_tokens, decay=0.995),
        pool_weights=PoolWeights(priors=priors),
    )
