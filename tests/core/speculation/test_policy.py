"""The bundle as a round uses it: plan, vote, learn. Whatever it learns or is told, the text stays the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.acceptance import walk
from moot.core.errors import ConfigError
from moot.core.generation import Generation
from moot.core.speculation.length import LENGTHS, Load
from moot.core.speculation.policy import (
    PoolPolicy,
    RequestPolicy,
    RoundPlan,
    SpeculationOptions,
    learn_trie,
    make_policy,
)
from moot.core.types import Draft, FinishReason, Proposal, SamplingParams, Verification
from moot.core.voting.calibration import Calibration, ShareAcceptance
from moot.core.voting.draft_trie import SHAPES
from moot.core.voting.voting import POLICIES, vote
from moot.core.voting.weights import WEIGHTS
from tests.core.learned import seen, trained

VOCAB = 50
CONTEXT = 4096


def target(position: int) -> int:
    return (position * position * 7 + position // 3) % VOCAB


class Script:
    """A drafter of tests: the true continuation, wrong from a drawn place on."""

    def __init__(self, drafter_id: str, right: int, confidence: int = 128) -> None:
        self.drafter_id, self.right, self.confidence = drafter_id, right, confidence

    def propose(self, position: int, k: int) -> Proposal:
        ids = tuple(target(position + i) if i < self.right else (target(position + i) + 1) % VOCAB for i in range(k))
        return Proposal(ids, (self.confidence,) * k, self.drafter_id)


def one_round(policy: RequestPolicy, state: Generation, drafters: list[Script], seconds_of_step: float = 0.037) -> int:
    """One round as a router drives it; the K asked for is returned."""
    plan = policy.plan(state, CONTEXT)
    k = plan.num_speculative_tokens
    proposals = [drafter.propose(state.base_length, k) for drafter in drafters if k]
    result = policy.vote(plan, proposals)
    base = state.base_length
    found = walk(result.draft, lambda node, path: target(base + len(path)), lambda t, n: False, state.num_remaining)
    verification = Verification(
        base,
        found.num_accepted,
        found.output_token_ids,
        found.finish,
        forward_us=round(seconds_of_step * 1e6),
        batch_requests=1,
        batch_tokens=1 + len(result.draft),
    )
    verification = state.advance(verification, result.draft, proposals, result.winner_ids)
    policy.learn(plan, result, verification, draft_seconds=0.0005)
    return k


def play(
    pool: PoolPolicy, drafters: list[Script], rounds: int, max_tokens: int = 400
) -> tuple[RequestPolicy, Generation]:
    """A request of these drafters after so many rounds."""
    policy, state = pool.open([drafter.drafter_id for drafter in drafters]), start(max_tokens)
    for _ in range(rounds):
        one_round(policy, state, drafters)
    return policy, state


def fixed(num_speculative_tokens: int = 4, **options: Any) -> PoolPolicy:
    """A pool whose requests draft so many tokens in every round."""
    return make_policy(SpeculationOptions(length="fixed", num_speculative_tokens=num_speculative_tokens, **options))


def start(max_tokens: int = 64) -> Generation:
    state = Generation((1, 2, 3), SamplingParams(max_tokens=max_tokens))
    state.open(Verification(3, 0, (target(3),)))
    return state


@settings(max_examples=120)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(sorted(WEIGHTS)),
    st.sampled_from(LENGTHS),
    st.lists(st.integers(0, 8), max_size=4),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_every_bundle_yields_the_targets_text(
    vote_name: str, shape: str, weights: str, length: str, rights: list[int], max_tokens: int, asked: int | None
) -> None:
    """Any policy, drafter set (none included) and K: the target's ids, exactly max_tokens of them, counters in
    order."""
    pool = make_policy(SpeculationOptions(vote=vote_name, shape=shape, weights=weights, length=length))
    drafters = [Script(f"d{i}", right) for i, right in enumerate(rights)]
    policy = pool.open([drafter.drafter_id for drafter in drafters], asked)
    state = start(max_tokens)
    while not state.is_finished:
        one_round(policy, state, drafters)
        assert state.num_rounds <= max_tokens
    policy.close()
    assert state.output_token_ids == [target(3 + i) for i in range(max_tokens)]
    assert sum(state.num_accepted_tokens_per_position) == state.num_accepted_tokens <= state.num_draft_tokens
    if asked == 0:
        assert state.num_draft_tokens == 0


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """A misspelt policy fails at start and says what there is."""
    for key, listed in (
        ("vote", "majority, calibrated, accumulated, best"),
        ("shape", "chain, siblings, tree"),
        ("weights", "hedge, minions, uniform"),
        ("length", "goodput, minions, fixed"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: 'nope' is not one of {listed}"):
            make_policy(SpeculationOptions(**{key: "nope"}))  # type: ignore[arg-type]  # one name at a time
    with pytest.raises(ConfigError, match="num_speculative_tokens must be at least 0"):
        make_policy(SpeculationOptions(num_speculative_tokens=-1))


def test_a_request_may_fix_its_length_or_refuse_drafting() -> None:
    """0: no drafting; n: always n, not above the pool's; None: the policy decides."""
    pool = make_policy(SpeculationOptions(num_speculative_tokens=6))
    state = start()
    for asked, length in ((0, 0), (3, 3), (99, 6)):
        assert pool.open(["a"], asked).plan(state, CONTEXT).num_speculative_tokens == length
    assert 0 <= pool.open(["a"]).plan(state, CONTEXT).num_speculative_tokens <= 6
    assert pool.open(["a"], 3).plan(state, CONTEXT).value is None


def test_a_plan_respects_context_and_remaining_tokens() -> None:
    """prefix 4 of 8: K is 3 at most; two tokens left: K is 1 at most; nothing to draft, no budget either."""
    policy = make_policy().open(["a"], 8)
    assert policy.plan(start(), 8).num_speculative_tokens == 3
    assert policy.plan(start(3), CONTEXT).num_speculative_tokens == 1
    none = policy.plan(start(2), CONTEXT)
    assert (none.num_speculative_tokens, none.max_draft_tokens) == (0, 0)


def test_the_calibrated_bundle_learns_whom_to_believe() -> None:
    """Two weak drafters of one mind against one good one: after some rounds most of its tokens are accepted."""
    drafters = [Script("good", 4, 200), Script("weak", 0, 90), Script("weaker", 0, 90)]
    policy, state = play(fixed(shape="chain"), drafters, 20)
    before = state.num_accepted_tokens
    for _ in range(20):
        one_round(policy, state, drafters)
    assert state.num_accepted_tokens - before == 80
    assert state.drafters["good"].num_votes_won >= 20
    assert max(policy.weights, key=lambda id_: policy.weights[id_]) == "good"


def test_what_a_request_learned_serves_the_next() -> None:
    """Weights flow back when it closes; tables are the pool's; a forgotten drafter starts anew."""
    pool = fixed()
    first, _ = play(pool, [Script("good", 4), Script("weak", 0)], 30)
    first.close()
    second = pool.open(["good", "weak"])
    assert second.weights["good"] > 0.5 > second.weights["weak"]
    assert pool.calibration.of("good").rate(128, 0) > 0.8
    pool.forget("good")
    assert pool.calibration.of("good").rate(128, 0) < 0.5
    assert pool.pool_weights.start(["good"]) == {"good": 1.0}


def test_pools_do_not_share_what_they_learned() -> None:
    """Nothing learned in one run reaches the next: a second bundle from the same names starts from the priors."""
    policy, _ = play(fixed(8), [Script("a", 8)], 10)
    policy.close()
    fresh = fixed(8)
    assert fresh.calibration.of("a").rate(128, 0) == pytest.approx(1 / 3)
    assert fresh.acceptance.rate(0.5, 0) == pytest.approx(0.5)


def learned(token_ids: tuple[int, ...], *proposals: Proposal) -> tuple[Calibration, ShareAcceptance]:
    calibration, acceptance = Calibration(), ShareAcceptance()
    result = vote(proposals, {}, policy="calibrated", shape="tree", calibration=calibration)
    learn_trie(result, token_ids, calibration, acceptance)
    return calibration, acceptance


def test_a_token_counts_only_where_the_proposal_was_right_up_to_it() -> None:
    """(1, 9, 3) against the text 1 2 3: a hit, a miss, and nothing about the third although it is equal."""
    calibration, _ = learned((1, 2, 3), Proposal((1, 9, 3), (255, 128, 0), "a"))
    prior = Calibration().of("a").rate(0, 0)
    table = calibration.of("a")
    assert table.rate(255, 0) > prior > table.rate(128, 1)
    assert table.rate(0, 2) == pytest.approx(prior)


def test_the_end_of_the_committed_text_is_not_a_miss() -> None:
    """(1, 2, 3) against the text 1 2: two hits, and the third is not known yet."""
    calibration, _ = learned((1, 2), Proposal((1, 2, 3), (255, 128, 0), "a"))
    prior = Calibration().of("a").rate(0, 0)
    assert calibration.of("a").rate(128, 1) > prior
    assert calibration.of("a").rate(0, 2) == pytest.approx(prior)


def test_losers_that_were_not_verified_teach_as_well() -> None:
    """The target's next token is known whether or not it was in the draft: the loser's hit counts."""
    calibration = Calibration()
    proposals = [Proposal((7,), (10,), "a"), Proposal((5,), (10,), "b")]
    result = vote(proposals, {}, policy="calibrated", shape="chain", calibration=calibration)
    assert result.draft == Draft.chain((5,))
    learn_trie(result, (7,), calibration, ShareAcceptance())
    assert calibration.of("a").rate(10, 0) > calibration.of("b").rate(10, 0)


def test_a_gap_in_the_text_settles_open_gains() -> None:
    """A verifier was lost and the opening elsewhere committed a token that no round showed: later tokens must not be
    compared with the proposals of before the gap, where they would fit by accident."""

    def weights_after(gap: int) -> float:
        policy = fixed(shape="chain").open(["a", "b"])
        plan = policy.plan(start(), CONTEXT)
        result = policy.vote(plan, [Proposal((1, 2, 3, 3), drafter_id="a"), Proposal((1, 9), drafter_id="b")])
        policy.learn(plan, result, Verification(4, 1, (1, 2)), 0.0)
        nothing = policy.vote(plan, [])
        policy.learn(plan, nothing, Verification(6 + gap, 0, (3, 3)), 0.0)
        return policy.weights["a"]

    assert weights_after(gap=0) > weights_after(gap=1) > 0.5


def test_a_slower_step_is_paid_by_every_request_of_it() -> None:
    """A node that saves its request a third of a step, where a row more makes the step a quarter longer: alone it is
    sent, among four that wait for the step it is not."""
    sent = []
    for load in (Load(1, 0), Load(4, 3)):
        pool = make_policy()
        seen(pool.verify_cost, {size: 0.03 * (0.75 + 0.25 * size) for size in range(1, 13)})
        policy = pool.open(["a"])
        plan = policy.plan(start(), CONTEXT, load)
        sent.append(len(policy.vote(RoundPlan(1, 16, plan.value), [Script("a", 8).propose(4, 1)]).draft))
    assert sent == [1, 0]


def test_drafting_stops_at_saturation_and_returns_with_room() -> None:
    """C32: where every token of a step costs the same, K is 0 with many requests; alone on a flat cost it is long."""
    pool = make_policy()
    policy, state = pool.open(["a"]), start(100_000)
    asked = 0
    for _ in range(60):
        asked = one_round(policy, state, [Script("a", 5)], 0.03 + 0.0002 * (1 + asked))
    assert asked >= 4
    seen(pool.verify_cost, {2**power: 0.03 * max(1, 2**power / 16) for power in range(10)}, 15)
    policy = pool.open(["a"])
    assert policy.plan(start(), CONTEXT, Load(64, 63)).num_speculative_tokens == 0
    assert policy.plan(start(), CONTEXT, Load(1, 0)).num_speculative_tokens >= 4


def test_nodes_that_do_not_pay_are_not_verified() -> None:
    """A drafter known to be wrong costs nothing at the verifier: its tokens are asked for now and then, not sent."""
    pool = make_policy(SpeculationOptions(num_speculative_tokens=4))
    trained({"a": 0.0}, 128, 1, pool.calibration)
    seen(pool.verify_cost, {size: 0.03 + 0.01 * size for size in (1, 2, 4, 8, 16)})
    policy = pool.open(["a"])
    plan = policy.plan(start(), CONTEXT)
    result = policy.vote(plan, [Script("a", 0).propose(4, 4)])
    assert len(result.draft) == 0
    assert result.agreement_ratio == 1.0


def test_one_family_votes_as_one() -> None:
    """Families named at admission reach the calibrated vote."""
    pool = fixed(1, shape="chain")
    trained({"a": 0.7, "b": 0.6, "c": 0.6}, 128, 1, pool.calibration)
    policy = pool.open(["a", "b", "c"])
    proposals = [Proposal((9,), (128,), "a"), Proposal((5,), (128,), "b"), Proposal((5,), (128,), "c")]
    plan = policy.plan(start(), CONTEXT)
    assert policy.vote(plan, proposals).draft.token_ids == (5,)
    pool.admit("b", "twins")
    pool.admit("c", "twins")
    assert policy.vote(plan, proposals).draft.token_ids == (9,)


def test_the_request_ends_inside_a_draft_by_a_stop_string() -> None:
    """C09 through the bundle: what was cut off reaches neither the counters nor the tables."""
    pool = fixed(shape="chain")
    policy, state = pool.open(["a"]), start()
    plan = policy.plan(state, CONTEXT)
    proposal = Script("a", 4).propose(state.base_length, 4)
    result = policy.vote(plan, [proposal])
    ids = tuple(target(state.base_length + i) for i in range(5))
    verification = Verification(state.base_length, 4, ids, forward_us=1000, batch_requests=1, batch_tokens=5)
    verification = state.advance(verification, result.draft, [proposal], result.winner_ids, 2, stopped=True)
    policy.learn(plan, result, verification, 0.0)
    policy.close()
    assert (state.num_accepted_tokens, state.finish_reason) == (2, FinishReason.STOP)
    table = pool.calibration.of("a")
    assert table.rate(128, 1) > table.rate(128, 2) == table.rate(128, 7), "depth 2 has learned nothing of its own"
    assert state.drafters["a"].num_accepted_tokens == 2


def test_only_what_a_draft_adds_to_the_routers_work_counts() -> None:
    """A round without a draft takes the router's own time, too: of a round that drafts only the difference is a
    cost of drafting. A request that has ended is not waited for any more."""
    pool = fixed()
    policy = pool.open(["a"])
    verification = Verification(4, 0, (1,), forward_us=10_000, batch_requests=1, batch_tokens=1)
    nothing = policy.vote(RoundPlan(0, 0), [])
    policy.learn(RoundPlan(0, 0), nothing, verification, 0.0, own_seconds=0.0003)
    policy.learn(RoundPlan(4, 8), nothing, replace(verification, base_length=5), 0.0, own_seconds=0.0007)
    assert 0.0001 < pool.router_cost.seconds(4) < 0.0005
    assert pool.num_open == 1
    policy.close()
    assert pool.num_open == 0
