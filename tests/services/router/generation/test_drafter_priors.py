"""Priors: what a drafter's vote weighs before anything is known of it."""

from __future__ import annotations

import pytest

from moot.core.errors import ConfigError
from moot.core.options import make_config
from moot.core.speculation.policy import RoundPlan, SpeculationOptions, make_policy
from moot.core.types import Proposal
from moot.core.voting.voting import POLICIES
from moot.core.voting.weights import PoolWeights
from services.router.config import RouterConfig
from services.router.generation.drafter_set import parse_priors

WRONG = ["a", "a=", "=1", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "a=1=x"]


@pytest.mark.parametrize("entry", WRONG)
def test_a_prior_that_is_none_is_refused(entry: str) -> None:
    """Positive, finite, and of somebody: the message quotes what is not, at start."""
    with pytest.raises(ConfigError, match=f"--drafter-priors: {entry!r}"):
        make_config(RouterConfig, model="m", verifiers=("h:1",), drafter_priors=("good=2", entry))


def test_a_drafter_has_one_prior() -> None:
    """Named twice is a mistake, not the last word."""
    with pytest.raises(ConfigError, match="a is named twice"):
        parse_priors(["a=1", "b=2", "a=3"])
    assert parse_priors(["a=0.5", "b=2e3"]) == {"a": 0.5, "b": 2000.0}


@pytest.mark.parametrize("vote", sorted(POLICIES))
def test_the_first_vote_follows_the_prior(vote: str) -> None:
    """Two drafters of which nothing else is known disagree: the heavier one's proposal is the draft, whichever it is.
    A prior of one that is not there changes nothing."""
    proposals = [Proposal((1, 2, 3), drafter_id="a"), Proposal((4, 5, 6), drafter_id="b")]
    for heavy, first in (("a", 1), ("b", 4)):
        policy = make_policy(
            SpeculationOptions(vote=vote, shape="chain", length="fixed"), priors={heavy: 4.0, "nobody": 9.0}
        )
        result = policy.open(["a", "b"]).vote(RoundPlan(3, 3), proposals)
        assert result.draft.token_ids[0] == first


def test_priors_wait_for_drafters_that_join_later_and_fade() -> None:
    """Whoever joins starts with its prior beside the weights that others have earned by then; one that is forgotten
    starts with it again; what requests leave behind replaces it."""
    weights = PoolWeights(rate=0.5, priors={"late": 3.0})
    assert weights.start(["a"]) == {"a": 1.0}
    assert weights.start(["a", "late"]) == {"a": 0.25, "late": 0.75}
    for _ in range(20):
        weights.flow_back({"a": 0.75, "late": 0.25})
    assert weights.start(["a", "late"]) == pytest.approx({"a": 0.75, "late": 0.25}, abs=1e-3)
    weights.forget("late")
    assert weights.numbers.keys() == {"a"}
    assert weights.start(["late"]) == {"late": 1.0}
    assert weights.numbers["late"] == 3.0
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            PoolWeights(priors={"a": wrong})
