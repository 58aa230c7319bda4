"""The vote: each policy's winner by hand-worked cases, the rule for ties, abstention, C20, C33 and C34."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.acceptance import validate_draft, walk
from moot.core.errors import ConfigError
from moot.core.types import Draft, Proposal
from moot.core.voting.calibration import Calibration, DrafterTable, ShareAcceptance
from moot.core.voting.draft_trie import SHAPES, DraftTrie
from moot.core.voting.voting import INVALID_REASONS, POLICIES, VoteResult, validate_proposal, vote
from tests.core.learned import trained

DRAFTERS = ("a", "b", "c", "d")


def proposal(drafter_id: str, *token_ids: int, confidence: int = 0) -> Proposal:
    return Proposal(token_ids, (confidence,) * len(token_ids), drafter_id)


def path_ids(result: VoteResult) -> tuple[int, ...]:
    return tuple(result.draft.token_ids[index] for index in result.path)


@st.composite
def tries(draw: st.DrawFn) -> list[Proposal]:
    """Up to two chains from each of some drafters, over a vocabulary small enough for agreement."""
    proposals: list[Proposal] = []
    for drafter_id in draw(st.lists(st.sampled_from(DRAFTERS), unique=True)):
        for _ in range(draw(st.integers(1, 2))):
            ids = draw(st.lists(st.integers(0, 3), max_size=6))
            proposals.append(Proposal(tuple(ids), tuple(draw(st.integers(0, 255)) for _ in ids), drafter_id))
    return proposals


weight_maps = st.fixed_dictionaries({id_: st.sampled_from([0.1, 0.2, 0.3, 0.5]) for id_ in DRAFTERS})


@settings(max_examples=200)
@given(
    tries(),
    weight_maps,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 7),
    st.integers(0, 9),
)
def test_any_vote_yields_a_wellformed_draft_in_any_order_of_arrival(
    proposals: list[Proposal], weights: dict[str, float], policy: str, shape: str, k: int, budget: int
) -> None:
    """Depth and node limits hold, every node is a head of somebody's proposal, and the order of arrival is nothing."""
    calibration = Calibration()
    calibration.of("a").record(200, 0, True)

    def run(ordered: list[Proposal]) -> VoteResult:
        limits = {"num_speculative_tokens": k, "max_draft_tokens": budget}
        learned = {"calibration": calibration, "acceptance": ShareAcceptance()}
        return vote(ordered, weights, policy=policy, shape=shape, **limits, **learned)  # type: ignore[arg-type]

    result = run(proposals)
    draft = result.draft
    assert validate_draft(draft, 4, budget) is None
    heads = {p.token_ids[:n] for p in proposals for n in range(1, len(p.token_ids) + 1)}
    for index in range(len(draft)):
        chain: tuple[int, ...] = ()
        while index >= 0:
            chain = (draft.token_ids[index], *chain)
            index = draft.parents[index]
        assert chain in heads
        assert len(chain) <= k
    if shape == "chain" or policy == "best":
        assert draft.is_chain
    assert all(draft.parents[b] == a for a, b in zip((-1, *result.path), result.path, strict=False)), (
        "the voted path is one path from the prefix"
    )
    assert len(result.winners) == len(result.path)
    for depth, winners in enumerate(result.winners):
        head = path_ids(result)[: depth + 1]
        assert set(winners) == {p.drafter_id for p in proposals if p.token_ids[: depth + 1] == head}
    # Chains of one drafter stand best first, so only whole drafters may be shuffled.
    shuffled = sorted(proposals, key=lambda p: (p.drafter_id in DRAFTERS[:2], -DRAFTERS.index(p.drafter_id)))
    again = run(shuffled)
    assert (again.draft, again.path, again.winners) == (draft, result.path, result.winners)


def test_majority_counts_weights_at_each_depth() -> None:
    """Minions: two light drafters together outweigh a heavier one, and the walk goes on among those who agree."""
    proposals = [proposal("a", 1, 2), proposal("b", 5, 6, 7), proposal("c", 5, 8)]
    result = vote(proposals, {"a": 0.4, "b": 0.35, "c": 0.25}, policy="majority")
    assert path_ids(result) == (5, 6, 7)
    assert result.winners == (("b", "c"), ("b",), ("b",))
    assert result.winner_ids == ("b",)
    assert result.agreement_ratio == pytest.approx(2 / 3)


def test_positions_are_never_voted_independently() -> None:
    """7 leads at the second position when positions are counted alone, but nobody proposed 5 then 7: that wrong rule
    yields a text that no drafter proposed."""
    proposals = [proposal("a", 5, 6), proposal("b", 5, 6), proposal("c", 1, 7), proposal("d", 2, 7)]
    weights = {"a": 0.3, "b": 0.3, "c": 0.35, "d": 0.35}
    spliced: list[int] = []
    for depth in range(2):
        tally: Counter[int] = Counter()
        for p in proposals:
            tally[p.token_ids[depth]] += weights[p.drafter_id]  # type: ignore[assignment]  # weights are no counts
        spliced.append(max(tally, key=tally.__getitem__))
    assert tuple(spliced) not in {p.token_ids for p in proposals}
    assert path_ids(vote(proposals, weights, policy="majority")) == (5, 6)


def test_tie_goes_to_the_heaviest_single_drafter_then_to_the_lowest_id() -> None:
    """Equal sums: one drafter of .5 beats .3 + .2 in either floating-point order; all equal: the lowest id."""
    three = [proposal("a", 9), proposal("b", 2), proposal("c", 2)]
    assert path_ids(vote(three, {"a": 0.5, "b": 0.3, "c": 0.2})) == (9,)
    # 0.1 + 0.2 > 0.3 in floating point, and is a tie all the same.
    assert path_ids(vote(three, {"a": 0.3, "b": 0.1, "c": 0.2})) == (9,)
    assert path_ids(vote([proposal("a", 9), proposal("b", 2)], {"a": 0.5, "b": 0.5})) == (2,)


def test_accumulated_prefers_the_longer_support() -> None:
    """The heaviest first token loses to a path whose sum of node weights is larger."""
    proposals = [proposal("a", 1), proposal("b", 5, 6, 7)]
    weights = {"a": 0.6, "b": 0.4}
    assert path_ids(vote(proposals, weights, policy="majority")) == (1,)
    assert path_ids(vote(proposals, weights, policy="accumulated")) == (5, 6, 7)


def test_best_takes_the_whole_proposal_of_the_heaviest() -> None:
    """No vote: agreement of the others counts for nothing; of its own chains the drafter's first is taken."""
    proposals = [proposal("a", 1, 2, 3), proposal("a", 7, 8), proposal("b", 5, 6), proposal("c", 5, 6)]
    result = vote(proposals, {"a": 0.4, "b": 0.3, "c": 0.3}, policy="best", shape="tree")
    assert result.draft == Draft.chain((1, 2, 3))
    assert result.winner_ids == ("a",)


def test_calibrated_lets_one_right_drafter_outvote_two_weak_ones() -> None:
    """What a drafter says is worth its measured hit rate: .9 beats the noisy-or of .3 and .3, not so by weight."""
    proposals = [proposal("a", 1), proposal("b", 5), proposal("c", 5)]
    calibration = trained({"a": 0.9, "b": 0.3, "c": 0.3})
    even = dict.fromkeys(DRAFTERS, 0.25)
    assert path_ids(vote(proposals, even, policy="majority")) == (5,)
    assert path_ids(vote(proposals, even, policy="calibrated", calibration=calibration)) == (1,)


def test_a_family_counts_as_its_strongest() -> None:
    """Two alike drafters of .6 make .6, not .84: one stranger of .7 wins against them, and not without the family."""
    proposals = [proposal("a", 1), proposal("b", 5), proposal("c", 5)]
    calibration = trained({"a": 0.7, "b": 0.6, "c": 0.6})

    twins = {"b": "twins", "c": "twins"}

    def winner(calibration: Calibration, families: dict[str, str]) -> tuple[int, ...]:
        return path_ids(vote(proposals, {}, policy="calibrated", calibration=calibration, families=families))

    assert winner(calibration, {}) == (5,)
    assert winner(calibration, twins) == (1,)
    # The strongest counts wherever it stands in the order.
    for unequal in ({"a": 0.5, "b": 0.6, "c": 0.3}, {"a": 0.5, "b": 0.3, "c": 0.6}):
        assert winner(trained(unequal), twins) == (5,)


def test_agreement_ranks_and_the_strongest_says_how_likely() -> None:
    """Two of .5 who agree go before one of .6, but they are no .75: a tree spends its tokens by the highest rate, so
    that alike drafters who are wrong together cannot fill it."""
    calibration = trained({"a": 0.6, "b": 0.5, "c": 0.5})
    proposals = [proposal("a", 1, 2), proposal("b", 5, 6), proposal("c", 5, 6)]
    result = vote(proposals, {}, policy="calibrated", shape="tree", max_draft_tokens=4, calibration=calibration)
    assert path_ids(result)[0] == 5
    (first, better), (second, worse) = result.shares.of(0)
    assert [result.trie.token_ids[node] for node in (first, second)] == [5, 1]
    # Scaled to a sum of 1, as one token at most is right.
    assert (better, worse) == (pytest.approx(0.5 / 1.1, abs=0.02), pytest.approx(0.6 / 1.1, abs=0.02))
    assert result.draft.token_ids[0] == 1


def test_confidence_decides_when_it_was_informative() -> None:
    """The same drafter is believed in the bin where it was right and not where it was wrong."""
    table = trained({"a": 1.0}, 250)
    trained({"a": 0.0}, 10, calibration=table)
    trained({"b": 0.5}, 100, calibration=table)
    for byte, winner in ((250, 1), (10, 5)):
        proposals = [proposal("a", 1, confidence=byte), proposal("b", 5, confidence=100)]
        assert path_ids(vote(proposals, {}, policy="calibrated", calibration=table)) == (winner,)


def test_hit_rate_starts_from_the_prior_moves_and_forgets() -> None:
    """Beta prior before data, then the measured rate, then, after a change, the new rate: old tokens fade."""
    table = DrafterTable()
    assert table.rate(0, 0) == pytest.approx(1 / 3)
    for _ in range(500):
        table.record(0, 0, True)
    assert table.rate(0, 0) > 0.95
    assert table.rate(255, 0) == pytest.approx(1 / 3)
    # A depth that was never seen starts from its bin.
    assert table.rate(0, 5) > 0.9
    for _ in range(1000):
        table.record(0, 0, False)
    assert table.rate(0, 0) < 0.05


def test_one_drafters_two_chains_are_one_drafter() -> None:
    """A drafter that proposes two chains through a node does not vote twice."""
    proposals = [proposal("a", 5, 6), proposal("a", 5, 7), proposal("b", 1)]
    assert path_ids(vote(proposals, {"a": 0.4, "b": 0.6})) == (1,)
    assert [len(drafters) for drafters in DraftTrie(proposals).drafters] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Proposal((), drafter_id="a"), "empty"),
        (Proposal((1,) * 9, (0,) * 9, "a"), "too_long"),
        (Proposal((1, 100), (0, 0), "a"), "vocabulary"),
        (Proposal((-1, 2), (0, 0), "a"), "vocabulary"),
        (Proposal((1, 2), (0,), "a"), "confidences"),
        (Proposal((1, 2), (0, 256), "a"), "confidences"),
        (Proposal((1, 2), (-1, 0), "a"), "confidences"),
    ],
)
def test_malformed_proposals_have_a_reason_of_a_closed_set(bad: Proposal, reason: str) -> None:
    """C20, C07: what is empty, too long or outside the tokenizer's vocabulary has no vote, and is counted by name."""
    assert validate_proposal(bad, vocab_size=100, max_tokens=8) == reason
    assert reason in INVALID_REASONS


def test_valid_proposals_have_no_reason() -> None:
    """The limits are inclusive: K ids, id vocab_size - 1, byte 255; confidences may be absent."""
    assert validate_proposal(Proposal((99,) * 8, (255,) * 8, "a"), 100, 8) is None
    assert validate_proposal(Proposal((0,), drafter_id="a"), 100, 8) is None


def test_abstaining_is_neither_for_nor_against() -> None:
    """C33: drafters with nothing to say are not counted as agreeing; nobody at all is no agreement, not a full one."""
    empty = [proposal(id_) for id_ in "abc"]
    for policy in POLICIES:
        silent = vote(empty, {}, policy=policy, calibration=Calibration())
        assert (silent.draft, silent.winners, silent.winner_ids, silent.agreement_ratio) == (Draft(), (), (), None)
    half = vote([*empty[:2], proposal("c", 4), proposal("d", 5)], {})
    assert half.agreement_ratio == 0.5
    assert half.winner_ids == ("c",)


def test_unanimous_and_wrong_loses_to_the_target() -> None:
    """C33: all drafters agree on a wrong token; the vote is unanimous and the target's token comes out."""
    result = vote([proposal(id_, 7, 7) for id_ in DRAFTERS], {})
    assert result.agreement_ratio == 1.0
    assert walk(result.draft, lambda node, path: 3, lambda token, n: False, 9).output_token_ids == (3,)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_drafter_set_of_one_two_three_and_none(policy: str) -> None:
    """C34: one drafter; a tie of two; three with one dissenter of another length; a late or dead one is just absent."""

    def run(*proposals: Proposal) -> tuple[int, ...]:
        even = dict.fromkeys(DRAFTERS, 0.25)
        return path_ids(vote(list(proposals), even, policy=policy, calibration=Calibration()))

    assert run() == ()
    assert run(proposal("a", 4, 5)) == (4, 5)
    assert run(proposal("a", 4), proposal("b", 3)) == (3,)
    dissent = run(proposal("a", 4, 5), proposal("b", 4, 5), proposal("c", 9))
    assert dissent == (4, 5)
    assert run(proposal("a", 4, 5), proposal("c", 4)) in ((4, 5), (4,))


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """A misspelt policy is an error that lists what there is."""
    with pytest.raises(ConfigError, match=r"'majorty'.*majority, calibrated, accumulated, best"):
        vote([], {}, policy="majorty")
    with pytest.raises(ConfigError, match=r"chain, siblings, tree"):
        vote([], {}, shape="ring")
