"""Weights: who is rewarded, when a gain is known, and how a pool remembers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.types import Proposal
from moot.core.voting.weights import WEIGHTS, Contest, Hedge, MinionsWeights, PoolWeights, Uniform

EVEN = {"a": 1.0, "b": 1.0, "c": 1.0}


def contest(k: int, committed: tuple[int, ...], *outcome: Any, **proposed: tuple[int, ...]) -> Contest:
    """A round of K = `k`; `outcome`: winners, nodes drafted and accepted."""
    return Contest(k, [Proposal(ids, drafter_id=id_) for id_, ids in proposed.items()], committed, *outcome)


def test_hedge_multiplies_by_the_gain_of_the_own_proposal() -> None:
    """gain = leading tokens of the own proposal that equal the committed text, over K: 2/4, 1/4 and 0."""
    hedge = Hedge(EVEN, eta=0.4)
    hedge.observe(contest(4, (1, 2, 3), a=(1, 2, 9, 9), b=(1, 9, 9, 9), c=(9, 2, 3, 4)))
    raw = {"a": math.exp(0.4 * 0.5), "b": math.exp(0.4 * 0.25), "c": 1.0}
    assert hedge.numbers == pytest.approx({id_: number / sum(raw.values()) for id_, number in raw.items()})


def test_hedge_settles_a_censored_gain_when_later_tokens_are_known() -> None:
    """A loser that agrees up to the end of the committed text is not wrong beyond it: its gain waits, then counts.
    Counted as wrong there, the first two would rank level."""
    waited, known_at_once = Hedge(EVEN), Hedge(EVEN)
    proposals = {"a": (1, 2, 3, 4), "b": (1, 9, 9, 9), "c": (8, 8, 8, 8)}
    waited.observe(contest(4, (1,), **proposals))
    assert waited.num_open_rounds == 1
    assert waited.numbers == pytest.approx(dict.fromkeys(EVEN, 1 / 3))
    waited.observe(contest(4, (2, 3, 4)))
    assert waited.num_open_rounds == 0
    known_at_once.observe(contest(4, (1, 2, 3, 4), **proposals))
    assert waited.numbers == pytest.approx(known_at_once.numbers)
    assert waited.numbers["a"] > waited.numbers["b"] > waited.numbers["c"]


def test_hedge_counts_a_drafters_best_chain_once() -> None:
    """Two chains of one drafter are one opinion each of which may be right: the better one is its gain."""
    one = Hedge(EVEN)
    one.observe(contest(2, (1, 2), a=(1, 2), b=(1, 9), c=(9,)))
    chains_of_a = [Proposal((9, 9), drafter_id="a"), Proposal((1, 2), drafter_id="a")]
    for ordered in (chains_of_a, chains_of_a[::-1]):
        two = Hedge(EVEN)
        two.observe(Contest(2, [*ordered, *contest(2, (), b=(1, 9), c=(9,)).proposals], (1, 2)))
        assert two.numbers == pytest.approx(one.numbers)


def test_abstaining_changes_no_weight() -> None:
    """A drafter that said nothing keeps its weight; those that spoke share theirs anew."""
    hedge = Hedge(EVEN)
    for _ in range(20):
        hedge.observe(contest(2, (1, 2), a=(1, 2), b=(9, 9)))
    assert hedge.numbers["c"] == pytest.approx(1 / 3, rel=0.1)
    assert hedge.numbers["a"] > 0.5 > 0.2 > hedge.numbers["b"]


def test_open_rounds_end_with_the_request() -> None:
    """The text ended in agreement: it counts as far as it went, and nothing stays open."""
    hedge = Hedge(EVEN)
    hedge.observe(contest(4, (1, 2), a=(1, 2, 3, 4), b=(1, 9, 9, 9), c=(9,)))
    hedge.finish()
    assert hedge.num_open_rounds == 0
    assert hedge.numbers["a"] > hedge.numbers["b"] > hedge.numbers["c"]


def test_minions_moves_the_winner_only() -> None:
    """Above the threshold the winner is rewarded, below it punished; losers move by normalising alone."""
    minions = MinionsWeights(EVEN)
    minions.observe(contest(4, (1, 2), ("a",), 4, 2, a=(1,), b=(2,)))
    rewarded = dict(minions.numbers)
    assert rewarded["a"] == pytest.approx(1.1 / 3.1)
    assert rewarded["b"] == pytest.approx(rewarded["c"])
    minions.observe(contest(4, (9,), ("b",), 4, 1, a=(1,), b=(2,)))
    assert minions.numbers["b"] < rewarded["b"]
    assert minions.numbers["a"] / minions.numbers["c"] == pytest.approx(rewarded["a"] / rewarded["c"])
    before = dict(minions.numbers)
    minions.observe(contest(4, (5,)))
    assert minions.numbers == before


def test_uniform_never_moves() -> None:
    """Whatever happens, and from whatever start."""
    uniform = Uniform({"a": 5.0, "b": 1.0})
    uniform.observe(contest(2, (1, 2), ("a",), 2, 2, a=(1, 2)))
    assert uniform.numbers == {"a": 0.5, "b": 0.5}


chains = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(WEIGHTS)),
    st.lists(st.tuples(st.dictionaries(st.sampled_from("abcde"), chains), chains), max_size=30),
)
def test_weights_stay_a_distribution_with_a_floor(
    name: str, rounds: list[tuple[dict[str, tuple[int, ...]], tuple[int, ...]]]
) -> None:
    """Positive, summing to 1, nobody silenced for good, nothing left open for long, for any history and newcomers."""
    weights = WEIGHTS[name](EVEN)
    for proposed, committed in rounds:
        weights.observe(contest(5, committed, sorted(proposed)[:1], 5, len(committed) - 1, **proposed))
        assert sum(weights.numbers.values()) == pytest.approx(1.0)
        assert min(weights.numbers.values()) >= 0.02 / 1.2
        if isinstance(weights, Hedge):
            assert weights.num_open_rounds <= 5
    weights.finish()
    assert sum(weights.numbers.values()) == pytest.approx(1.0)


def test_hedge_finds_the_best_drafter() -> None:
    """Over a request, the drafter that is right most often ends with most of the weight."""
    hedge = Hedge(EVEN)
    for i in range(60):
        good = (1, 2) if i % 5 else (9, 9)
        hedge.observe(contest(2, (1, 2, 3), a=good, b=(1, 9) if i % 3 else (9, 9), c=(9, 9)))
    assert max(hedge.numbers, key=lambda id_: hedge.numbers[id_]) == "a"
    assert hedge.numbers["a"] > 0.8


def test_pool_prior_starts_and_takes_back() -> None:
    """A request starts where the pool stands and moves it a little; absent drafters keep what they had."""
    pool = PoolWeights(rate=0.5)
    assert pool.start(["a", "b", "c", "d"]) == dict.fromkeys("abcd", 0.25)
    pool.flow_back({"a": 0.75, "b": 0.25})
    assert pool.numbers == pytest.approx({"a": 1.25, "b": 0.75, "c": 1.0, "d": 1.0})
    start = pool.start(["a", "c"])
    assert start == pytest.approx({"a": 1.25 / 2.25, "c": 1.0 / 2.25})
    pool.flow_back(start)
    assert pool.numbers == pytest.approx({"a": 1.25, "b": 0.75, "c": 1.0, "d": 1.0})
    assert pool.start([]) == {}
