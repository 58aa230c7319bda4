"""One budget of draft nodes for each verifier: the best nodes of all its requests, as many as pay for a slower step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.speculation.policy import RoundPlan, SpeculationOptions, make_policy
from moot.core.types import Proposal
from moot.core.voting.calibration import OwnAcceptance, ShareAcceptance
from moot.core.voting.draft_trie import Budget, worth
from tests.core.learned import seen, trained


def cpu(num_tokens: int) -> float:
    """8 rows for nothing, then one costs a second."""
    return 10.0 + max(num_tokens - 8, 0)


def kinked(slope: float, free: int) -> Callable[[int], float]:
    """So many rows for nothing, then each costs `slope`."""
    return lambda num_tokens: 1.0 + slope * max(num_tokens - free, 0)


def spent(budget: Budget, offers: dict[str, Sequence[float]], num_requests: float) -> dict[str, int]:
    """What each sends once all know of all."""
    for _ in range(2):
        counts = {name: budget.spend(name, values, num_requests) for name, values in offers.items()}
    return counts


COPY = [9.0, 8.0, 7.0, 6.0, 5.0]


@pytest.mark.parametrize(
    ("free", "sent", "price"), [([3.0, 1.5, 1.0], 1, 3.0), ([3.0, 2.5], 2, 2.5), ([3.0, 1.9], 1, 3.0)]
)
def test_the_best_nodes_of_all_requests_fill_the_step(free: list[float], sent: int, price: float) -> None:
    """Two requests, 8 free rows: 2 are theirs, 6 for the best nodes, 5 of the better request's and 1 of the other's;
    a 7th costs both a second, 2 in all: one that is worth 2.5 pays them, one worth 1.9 does not."""
    budget = Budget(cpu)
    assert spent(budget, {"copy": COPY, "free": free}, 2) == {"copy": 5, "free": sent}
    assert budget.price == price


def test_one_request_alone_spends_what_pays() -> None:
    """Rows at .3 seconds from the first on: a node worth .3 breaks even and is not sent."""
    assert spent(Budget(lambda n: 0.3 * n), {"a": [1.0, 0.5, 0.3, 0.1]}, 1) == {"a": 2}


def test_nothing_is_spent_at_saturation() -> None:
    """64 requests, each row costs its time: a node costs 64 seconds and saves at most the step's time, as a token."""
    offers: dict[str, Sequence[float]] = {f"r{i}": [60.0 - i / 64, 30.0] for i in range(64)}
    budget = Budget(lambda n: float(n))
    assert set(spent(budget, offers, 64).values()) == {0}
    assert budget.price > 60.0


def test_those_known_stand_for_all_of_a_step() -> None:
    """Four requests share a step and one is known here, the others being those of other routers: 4 free rows for each
    node that all of them send. Two steps that eight requests take in turns: each has room for half of them."""
    assert spent(Budget(cpu), {"a": [1.0, 0.9]}, 4) == {"a": 1}
    offers: dict[str, Sequence[float]] = {f"r{i}": [1.0, 0.9] for i in range(8)}
    assert set(spent(Budget(cpu), offers, 4).values()) == {1}


def test_drafts_of_fixed_length_come_first() -> None:
    """A request that fixes its K sends all of it and takes up room."""
    assert spent(Budget(cpu), {"fixed": [inf] * 5, "free": [1.0, 0.9, 0.8]}, 2) == {"fixed": 5, "free": 1}
    assert spent(Budget(cpu), {"fixed": [inf] * 9}, 1) == {"fixed": 9}
    assert spent(Budget(cpu), {"fixed": [inf] * 9, "free": [1.0, 0.9]}, 2) == {"fixed": 9, "free": 0}


def test_who_leaves_makes_room() -> None:
    """A request that has ended offers nothing any more, and is not counted."""
    budget = Budget(cpu)
    assert spent(budget, {"copy": [9.0] * 6, "free": [1.0, 0.9]}, 2) == {"copy": 6, "free": 0}
    budget.leave("copy")
    assert len(budget) == 1
    assert budget.spend("free", [1.0, 0.9], 2) == 2
    budget.leave("free")
    budget.leave("free")
    assert len(budget) == 0


VALUES = st.lists(st.floats(0.01, 20.0), max_size=6).map(lambda values: sorted(values, reverse=True))


@settings(max_examples=150)
@given(st.lists(VALUES, min_size=1, max_size=8), st.floats(0.0, 3.0), st.integers(1, 20))
def test_the_budget_is_the_joint_optimum(offers: list[list[float]], slope: float, free: int) -> None:
    """Whatever is offered, nobody sends a node that is worth less than one that another keeps back, and with values
    that differ the count is that of all offers in one list, cut where it pays."""
    seconds, count = kinked(slope, free), len(offers)
    budget = Budget(seconds)
    sent = spent(budget, {str(i): values for i, values in enumerate(offers)}, count)
    kept = [value for i, values in enumerate(offers) for value in values[sent[str(i)] :]]
    gone = [value for i, values in enumerate(offers) for value in values[: sent[str(i)]]]
    assert min(gone, default=inf) > max(kept, default=0.0)
    ranked = sorted(gone + kept, reverse=True)
    best = worth(ranked, 1.0, lambda n: count * seconds(count + n))
    if len(set(ranked)) == len(ranked):
        assert len(gone) == best


@settings(max_examples=100)
@given(VALUES, st.integers(1, 30), st.integers(0, 30), st.floats(0.0, 3.0), st.integers(1, 40))
def test_a_higher_load_never_buys_more(values: list[float], few: int, more: int, slope: float, free: int) -> None:
    """The same nodes, rows that are free and then expensive: with more requests in the step each sends as many or
    fewer."""
    quiet, busy = (
        spent(Budget(kinked(slope, free)), {str(i): values for i in range(count)}, count)["0"]
        for count in (few, few + more)
    )
    assert busy <= quiet


def test_a_request_learns_how_it_differs_from_the_others() -> None:
    """Shares that mean .4 for all: after 20 hits a request takes them for more, after 20 misses for less, and what the
    pool knows stays. By hand, strength 8 and no fading: (20 + 8) / (20 * .4 + 8) = 1.75."""
    pool = ShareAcceptance()
    copies, writes = OwnAcceptance(pool, 8.0, 1.0), OwnAcceptance(pool, 8.0, 1.0)
    assert copies.rate(0.4, 0) == pool.rate(0.4, 0) == pytest.approx(0.4)
    for _ in range(20):
        copies.record([0.3, 0.1], 0, True)
        writes.record([0.3, 0.1], 0, False)
    assert copies.factor == pytest.approx(1.75)
    assert copies.rate(0.4, 0) == pytest.approx(0.7)
    assert copies.rate(0.9, 0) == 1.0
    assert writes.rate(0.4, 0) == pytest.approx(0.4 * 8 / 16)
    assert pool.rate(0.4, 0) == pytest.approx(0.4)


@pytest.mark.parametrize("shape", ["chain", "siblings", "tree"])
def test_every_shape_is_cut_at_the_price(shape: str) -> None:
    """Rows so expensive that only a first token pays: of a chain the tail goes, of a tree the branches as well; where
    rows cost nothing all of it is sent."""
    proposals = [Proposal((1, 2, 3), (128,) * 3, "a"), Proposal((5, 6), (128,) * 2, "b")]
    sizes = []
    for row_s in (0.0, 0.012, 1.0):
        pool = make_policy(SpeculationOptions(shape=shape, num_speculative_tokens=4))
        trained({"a": 0.6}, 128, 1, pool.calibration)
        seen(pool.verify_cost, {size: 0.03 + row_s * size for size in range(1, 7)})
        policy = pool.open(["a", "b"])
        sizes.append(len(policy.vote(RoundPlan(4, 16, value=0.03), proposals).draft))
        policy.close()
    assert sizes[0] > sizes[1] > sizes[2] == 0
