"""Shapes: which nodes are verified, in which order, and how many are worth it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.types import ROOT, Proposal
from moot.core.voting.calibration import Calibration, ShareAcceptance
from moot.core.voting.draft_trie import worth
from moot.core.voting.voting import VoteResult, vote

THREE = [Proposal((1, 2, 3), drafter_id="a"), Proposal((1, 5), drafter_id="b"), Proposal((7, 8), drafter_id="c")]
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def edges(result: VoteResult) -> set[tuple[int, ...]]:
    """Each node as the ids on its way from the prefix."""
    draft = result.draft
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return set(paths)


def test_shapes_of_one_vote() -> None:
    """chain: the voted path; siblings: and the children that lost to it, nothing below them; tree: the whole trie."""
    chain, siblings, tree = (edges(vote(THREE, WEIGHTS, shape=shape)) for shape in ("chain", "siblings", "tree"))
    assert chain == {(1,), (1, 2), (1, 2, 3)}
    assert siblings == chain | {(7,), (1, 5)}
    assert tree == siblings | {(7, 8)}


def test_tree_spends_its_budget_on_the_most_probable_nodes() -> None:
    """The probabilities are products of shares; of equal ones, (7,) and (1, 2, 3) with .2, the shallower is taken."""
    chances = {(1,): 0.8, (1, 2): 0.4, (1, 5): 0.24, (7,): 0.2, (1, 2, 3): 0.2, (7, 8): 0.04}
    ranked = list(chances)
    for budget in range(7):
        result = vote(THREE, WEIGHTS, shape="tree", max_draft_tokens=budget)
        assert edges(result) == set(ranked[:budget])
        assert sum(result.chances) == pytest.approx(sum(chances[edge] for edge in ranked[:budget]))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=6),
    st.integers(0, 8),
)
def test_a_smaller_budget_is_a_head_of_a_larger(raw: list[tuple[str, list[int]]], budget: int) -> None:
    """Cutting the order anywhere leaves a well-formed draft: what a budget buys never depends on a larger one."""
    proposals = [Proposal(tuple(ids), (128,) * len(ids), id_) for id_, ids in raw]

    def run(limit: int) -> VoteResult:
        return vote(proposals, {}, policy="calibrated", shape="tree", max_draft_tokens=limit, calibration=Calibration())

    small, large = run(budget).draft, run(budget + 3).draft
    assert large.token_ids[: len(small)] == small.token_ids
    assert large.parents[: len(small)] == small.parents


def test_learned_acceptance_turns_the_order() -> None:
    """Where a large share was never accepted and a small one always, the small one is verified first."""
    acceptance = ShareAcceptance()
    for _ in range(1500):
        acceptance.record(0.8, 0, False)
        acceptance.record(0.2, 0, True)
    assert vote(THREE, WEIGHTS, shape="tree", max_draft_tokens=1, acceptance=acceptance).draft.token_ids == (7,)
    assert acceptance.rate(0.8, 0) < 0.1 < 0.8 < acceptance.rate(0.2, 0)
    # Another depth and another bucket have learned nothing.
    assert acceptance.rate(0.8, 1) == pytest.approx(0.8)
    assert acceptance.rate(0.5, 0) == pytest.approx(0.5)


def test_learned_acceptance_keeps_the_order_of_shares_in_a_bucket() -> None:
    """Of two small shares the larger stays the likelier, however much was learned of such shares; and where half as
    much is accepted as they promise, both are halved."""
    acceptance = ShareAcceptance()
    for number in range(4000):
        acceptance.record(0.06, 1, number % 100 < 3)
    assert acceptance.rate(0.02, 1) < acceptance.rate(0.04, 1) < acceptance.rate(0.08, 1)
    assert acceptance.rate(0.06, 1) == pytest.approx(0.04, abs=0.011)
    assert acceptance.rate(0.08, 1) == pytest.approx(4 * acceptance.rate(0.02, 1))
    assert acceptance.rate(0.5, 1) == 0.5


def test_a_node_is_added_while_it_pays() -> None:
    """Probability times value against marginal cost, for a straight cost: the boundary is exact. Where the third node
    opens a new tile that costs .5 it does not pay alone, with two more of .3 it does."""
    chances = [0.9, 0.5, 0.3, 0.1]
    assert worth(chances, value=1.0, cost=lambda n: 0.2 * n) == 3
    assert worth(chances, value=1.0, cost=lambda n: 0.0) == 4
    assert worth(chances, value=1.0, cost=lambda n: 1.0 * n) == 0
    assert worth([0.5, 0.25], value=1.0, cost=lambda n: 0.25 * n) == 1, "what just breaks even is not worth it"
    assert worth([], value=1.0, cost=lambda n: n) == 0
    assert worth([0.9, 0.8, 0.3], 1.0, lambda n: 0.5 * (n > 2)) == 2
    assert worth([0.9, 0.8, 0.3, 0.3, 0.3], 1.0, lambda n: 0.5 * (n > 2)) == 5


def test_vote_drops_what_does_not_pay() -> None:
    """Only the part of the voted path that pays is drafted; the agreement is still of the vote."""
    result = vote(THREE, WEIGHTS, shape="chain", spend=lambda chances: worth(chances, 1.0, lambda n: 0.45 * n))
    assert result.draft.token_ids == (1,)
    nothing = vote(THREE, WEIGHTS, shape="tree", spend=lambda chances: worth(chances, 1.0, lambda n: 2.0 * n))
    assert len(nothing.draft) == 0
    assert nothing.winner_ids == ()
    assert nothing.agreement_ratio == pytest.approx(2 / 3)
