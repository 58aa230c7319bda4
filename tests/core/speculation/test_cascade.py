"""Whether cheap proposals make expensive ones needless: expected tokens, by each drafter's own hit rates."""

from __future__ import annotations

import itertools
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import ConfigError
from moot.core.generation import Generation
from moot.core.speculation.drafter_selection import ALWAYS_ASK, expected_share, is_expensive
from moot.core.speculation.policy import SpeculationOptions, make_policy
from moot.core.types import Proposal, SamplingParams
from moot.core.voting.calibration import Calibration
from tests.core.learned import trained

bytes_ = st.lists(st.integers(0, 255), min_size=1, max_size=12)


@given(
    confidences=st.lists(bytes_, max_size=4), num_tokens=st.integers(1, 9), hits=st.lists(st.booleans(), max_size=30)
)
@settings(max_examples=200)
def test_the_share_is_the_best_expectation(confidences: list[list[int]], num_tokens: int, hits: list[bool]) -> None:
    """Against the definition: over K, the sum over depths of the chance that all tokens up to there are right."""
    calibration = Calibration()
    for index, hit in enumerate(hits):
        calibration.of("d0").record(16 * (index % 16), index % 8, hit)
    proposals = [Proposal(tuple(range(len(row))), tuple(row), f"d{index % 2}") for index, row in enumerate(confidences)]
    expected = 0.0
    for proposal in proposals:
        table = calibration.of(proposal.drafter_id)
        rates = [table.rate(byte, depth) for depth, byte in enumerate(proposal.confidences[:num_tokens])]
        total = sum(itertools.accumulate(rates, operator.mul))
        expected = max(expected, total / num_tokens)
    share = expected_share(proposals, calibration, num_tokens)
    assert share == pytest.approx(expected)
    assert 0.0 <= share < ALWAYS_ASK


def test_a_short_proposal_leaves_room_for_others() -> None:
    """However sure, two tokens are no more than a quarter of eight; a proposal without confidences counts as well."""
    calibration = trained({"plain": 1.0}, depths=8, calibration=trained({"sure": 1.0}, 255, depths=8))
    assert 0.2 < expected_share([Proposal((1, 2), (255, 255), "sure")], calibration, 8) < 0.25
    assert expected_share([Proposal((1,) * 8, (255,) * 8, "sure")], calibration, 8) > 0.9
    assert expected_share([Proposal((1,) * 8, drafter_id="plain")], calibration, 8) > 0.9
    assert expected_share([Proposal((1,) * 8, (255,) * 8, "new")], calibration, 8) < 0.1


def test_expensive_is_a_part_of_the_round() -> None:
    """Who is not known yet is asked; who answers within a hundredth of a round is not worth sparing."""
    assert not is_expensive(None, 0.040)
    assert not is_expensive(0.002, None)
    assert not is_expensive(0.0004, 0.040)
    assert is_expensive(0.004, 0.040)


def test_without_a_cascade_nobody_is_expensive_and_nothing_is_sure() -> None:
    """The default asks everybody, whatever is known; a cascade of 0 is sure as soon as anything was proposed or not."""
    proposals = [Proposal((1,) * 4, (255,) * 4, "a")]
    for cascade, sure in ((ALWAYS_ASK, False), (0.01, True), (0.0, True)):
        policy = make_policy(SpeculationOptions(length="fixed", num_speculative_tokens=4, cascade=cascade)).open(["a"])
        plan = policy.plan(Generation((1,), SamplingParams(max_tokens=50)), 100)
        assert policy.is_sure(plan, proposals) is sure
        assert not policy.is_expensive(10.0)  # no round was seen yet
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="cascade"):
            make_policy(SpeculationOptions(cascade=bad))
