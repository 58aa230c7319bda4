"""Speculation length and the costs behind it: bounds, climbing, goodput, saturation, probing. C32 at core level."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.speculation.costs import DraftCost, VerifyCost
from moot.core.speculation.length import (
    Fixed,
    Goodput,
    Load,
    PositionAcceptance,
    Probes,
    RoundSample,
    bound_length,
)
from tests.core.learned import seen


def test_length_is_bounded_by_context_and_by_what_may_still_be_emitted() -> None:
    """prefix + K + 1 <= limit, and K + 1 <= remaining: the next token needs room as well; never negative."""
    assert bound_length(8, 100, 200, 50) == 8
    assert bound_length(8, 100, 105, 50) == 4
    assert bound_length(8, 100, 101, 50) == 0
    assert bound_length(8, 100, 90, 50) == 0
    assert bound_length(8, 100, 200, 3) == 2
    assert bound_length(8, 100, 200, 1) == 0
    assert bound_length(8, 100, 200, 0) == 0


def test_fixed_is_fixed() -> None:
    """Whatever is observed."""
    fixed = Fixed(5)
    fixed.observe(RoundSample(5, 5, 0, 9.0))
    assert fixed.next_length(Load(99)) == 5


def goodput(
    verify: VerifyCost | None = None,
    draft: DraftCost | None = None,
    pool: PositionAcceptance | None = None,
    **options: Any,
) -> Goodput:
    return Goodput(8, verify or VerifyCost(), draft or DraftCost(), pool or PositionAcceptance(8), **options)


def best(values: Sequence[float]) -> int:
    """The K of the highest goodput."""
    return max(range(len(values)), key=values.__getitem__)


def pooled(*samples: RoundSample, times: int = 1, decay: float = 0.95, max_length: int = 8) -> PositionAcceptance:
    """What is known of acceptance after these rounds, so many times over."""
    pool = PositionAcceptance(max_length, decay=decay)
    for sample in samples * times:
        pool.observe(sample)
    return pool


def rounds(policy: Goodput, acceptance: float, count: int, load: Load = Load()) -> list[int]:  # noqa: B008 - frozen
    """Rounds in which the accepted length is `acceptance` of K, rounded."""
    lengths: list[int] = []
    for _ in range(count):
        length = policy.next_length(load)
        lengths.append(length)
        policy.observe(RoundSample(length, length, round(acceptance * length)))
    return lengths


def measured(seconds_of: dict[int, float]) -> VerifyCost:
    return seen(VerifyCost(), seconds_of)


NEARLY_FREE = {1: 0.037, 2: 0.037, 4: 0.038, 8: 0.040, 16: 0.044, 32: 0.08, 64: 0.16, 128: 0.32, 576: 1.44}
"""Two cores, bfloat16: flat to 16 tokens, straight from there."""


def test_goodput_follows_acceptance() -> None:
    """With cheap verification: drafts that are accepted get the longest K, drafts that never are get none."""
    assert rounds(goodput(measured(NEARLY_FREE)), 1.0, 60)[-1] == 8
    assert rounds(goodput(measured({1: 0.03, 2: 0.05, 4: 0.09, 8: 0.17, 16: 0.3})), 0.0, 60)[-1] == 0


def test_goodput_is_the_argmax_of_tokens_per_second() -> None:
    """Checked against the formula by hand: rates .5, T(K) = 1 + .3 K, so 1, 1.5/1.3, 1.75/1.6, ... and K = 1."""
    policy = goodput(measured({n: 1.0 + 0.3 * (n - 1) for n in range(1, 17)}))
    values = policy.goodputs([0.5] * 8, Load())
    expected = [1.0, 1.5 / 1.3, 1.75 / 1.6]
    assert values[:3] == pytest.approx(expected, rel=0.05)
    assert best(values) == 1


def test_a_busy_verifier_is_not_made_slower() -> None:
    """C32: at saturation, where a token more costs a token's time, K is 0 for every request; when load falls it comes
    back by itself, without a probe."""
    policy = goodput(measured(NEARLY_FREE))
    assert rounds(policy, 0.75, 40)[-1] >= 4
    busy = rounds(policy, 0.75, 600, Load(num_requests=64))
    assert set(busy[5:]) == {0}, "not even probes: no draft could pay there"
    assert rounds(policy, 0.75, 3)[-1] >= 4


def test_length_moves_for_a_clear_gain_only() -> None:
    """Hysteresis: another K that is better by less than 5 % is left alone, one better by more is taken."""
    verify = measured({n: 1.0 + 0.125 * (n - 1) for n in range(1, 65)})
    first, second = Load(1), Load(2)
    for hysteresis, moves in ((0.05, False), (0.0, True)):
        policy = goodput(verify, hysteresis=hysteresis)
        before = policy.next_length(first)
        values = policy.goodputs([0.6] * 8, second)
        assert best(values) != before
        assert values[before] < max(values) < 1.05 * values[before]
        assert (policy.next_length(second) != before) is moves
    policy = goodput(verify)
    assert policy.next_length(first) > policy.next_length(Load(64)) == 0


def test_length_zero_probes_seldom_and_comes_back() -> None:
    """At K = 0 a round in 8, 16, ... drafts; once probes are accepted, drafting returns."""
    policy = goodput(measured({1: 0.03, 2: 0.038, 4: 0.05, 8: 0.08, 16: 0.16}))
    lengths = rounds(policy, 0.0, 400)
    zero_from = lengths.index(0)
    probes = [i for i, length in enumerate(lengths[zero_from:]) if length]
    assert probes
    assert len(probes) <= 8
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps == sorted(gaps)
    assert max(rounds(policy, 1.0, 3000)[-10:]) > 0


def test_short_requests_probe_together() -> None:
    """A pool whose every request is shorter than a probe's wait must still find out that drafting pays again."""
    verify, probes = measured({1: 0.03, 2: 0.038, 4: 0.05, 8: 0.08}), Probes()
    pool = pooled(RoundSample(8, 8, 0), times=300, decay=0.99)
    asked: list[int] = []
    for _ in range(100):
        asked += rounds(goodput(verify, pool=pool, pool_probes=probes), 1.0, 5)
    assert asked[:5] == [0] * 5
    assert asked[-1] > 0


def test_probes_wait_twice_as_long_each_time() -> None:
    """Due after 8 rounds, then 16, 32, 64, at most 128; at once after an accepted one; anew when drafting pays."""
    probes = Probes()
    due = [i for i in range(400) if probes.is_due()]
    assert [b - a for a, b in zip([-1, *due], due, strict=False)] == [9, 17, 33, 65, 129, 129]
    probes.accepted()
    assert [i for i in range(9) if probes.is_due()] == [0]
    probes.start_over()
    assert [i for i in range(12) if probes.is_due()] == [8]


def test_an_ended_round_says_nothing_about_tokens_that_were_not_tried() -> None:
    """The request ended after two accepted tokens: two hits, and no miss at the third."""
    cut, missed = pooled(RoundSample(4, 4, 2, is_cut=True)), pooled(RoundSample(4, 4, 2))
    assert cut.rate(1) == missed.rate(1) > 0.6
    assert cut.rate(2) == pytest.approx(0.6)
    assert missed.rate(2) < 0.6
    assert missed.rate(3) == pytest.approx(0.6)


def test_a_request_starts_from_the_pool_and_goes_its_own_way() -> None:
    """Few rounds: the pool's rate; many: its own."""
    pool = pooled(RoundSample(4, 4, 4), times=300, decay=0.99)
    mine = PositionAcceptance(4, pool)
    assert mine.rate(0) == pool.rate(0) > 0.9
    for _ in range(60):
        mine.observe(RoundSample(4, 4, 0))
    assert mine.rate(0) < 0.4
    assert pool.rate(0) > 0.9


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 2.0)), max_size=60))
def test_verify_cost_is_positive_and_never_falls_with_more_tokens(samples: list[tuple[int, float]]) -> None:
    """Whatever noise is fed: finite, positive, monotone, so a marginal cost is never negative."""
    cost = VerifyCost()
    for size, seconds in samples:
        cost.observe(size, seconds)
    curve = [cost.seconds(n) for n in range(700)]
    assert curve[0] > 0
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(curve))
    assert curve[-1] < float("inf")


def test_verify_cost_learns_the_curve_and_changes() -> None:
    """Between measured sizes it is straight; a machine that gets slower is followed; one pause is not believed."""
    cost = measured({1: 0.03, 9: 0.04, 33: 0.1})
    for size, seconds in ((1, 0.03), (5, 0.035), (33, 0.1), (57, 0.16)):
        assert cost.seconds(size) == pytest.approx(seconds, rel=0.01)
    assert seen(cost, {9: 5.0}, 1).seconds(9) < 0.06
    seen(cost, {9: 0.08}, 80)
    assert cost.seconds(9) == pytest.approx(0.08, rel=0.05)


def test_what_a_slow_moment_said_is_forgotten() -> None:
    """Two sizes alike, one last seen while the machine ran at a third of its speed: as it is not seen again, one sample
    comes to outweigh what it was, and in the end nothing is left of it, so that it is tried like a new one. That must
    not take longer than a few short answers."""
    cost = seen(seen(measured({1: 0.03, 5: 0.03}), {5: 0.09}, 30), {1: 0.03}, 460)
    after_some = cost.seconds(5)
    assert after_some > 0.05
    assert seen(cost, {5: 0.03}, 1).seconds(5) < 0.85 * after_some
    seen(cost, {1: 0.03}, 501)
    assert cost.seconds(5) < 0.033
    assert cost.seconds(1) == pytest.approx(0.03, rel=0.01)


def test_of_many_requests_that_draft_nothing_each_decides_now_and_then() -> None:
    """On a full verifier every fourth round of a request at K = 0 decides anew, and drafting returns with the first
    that does after the others have gone; a request that drafts, or is one of few, decides in every round."""
    verify = measured({n: 0.03 * n for n in (1, 2, 4, 8, 16, 32, 64, 128, 576)})
    decided: list[int] = []
    policy = goodput(verify)
    plain = policy.goodputs
    policy.goodputs = lambda *rest: decided.append(1) or plain(*rest)  # type: ignore[func-returns-value,method-assign]
    many = Load(64)
    rounds(policy, 0.0, 40, many)
    assert len(decided) <= 14
    policy.observe(RoundSample(0, 0, 0))
    policy._verify_cost = measured(NEARLY_FREE)
    assert max(rounds(policy, 1.0, 60, Load(1))) > 0
    decided.clear()
    rounds(policy, 1.0, 10, Load(1))
    assert len(decided) >= 10


def test_draft_times_fade_while_nothing_is_drafted() -> None:
    """What drafts took in a slow moment is half forgotten after a few hundred rounds without one, so that one that is
    made then counts."""
    cost = seen(seen(DraftCost(), {4: 0.1}, 50), {0: 0.0}, 1000)
    before = cost.seconds(4)
    assert seen(cost, {4: 0.001}, 3).seconds(4) < 0.6 * before


def test_verify_cost_ignores_what_is_no_measurement() -> None:
    """An answer without timing must not make verification look free."""
    cost = VerifyCost(prior_seconds=0.5)
    for size, seconds in ((0, 1.0), (5, 0.0), (-1, 1.0), (5, float("nan")), (5, float("inf"))):
        cost.observe(size, seconds)
    assert cost.seconds(1) == 0.5


def test_verify_cost_hopes_beyond_what_it_has_seen() -> None:
    """Only one-token steps known: larger ones are taken to be slightly dearer, so that they are tried."""
    cost = measured({1: 0.03})
    assert 0.03 < cost.seconds(9) < 0.04


def test_draft_cost_fits_start_and_slope() -> None:
    """d0 + d1 K from rounds of different K; with one K only, in proportion to K; nothing for K = 0."""
    cost = DraftCost()
    assert cost.seconds(4) == 0.0
    assert seen(cost, {4: 0.010}, 1).seconds(8) == pytest.approx(0.020)
    seen(cost, {2: 0.006, 4: 0.010}, 60)
    assert cost.seconds(8) == pytest.approx(0.018, rel=0.05)
    assert cost.seconds(0) == 0.0
    cost.observe(0, 99.0)
    assert cost.seconds(8) == pytest.approx(0.018, rel=0.05)


def test_a_step_that_many_report_counts_once() -> None:
    """Sixteen requests of one slow step say no more than one request alone would."""
    batched, alone = measured({9: 0.04}), measured({9: 0.04})
    for _ in range(16):
        batched.observe(9, 0.08, weight=1 / 16)
    seen(alone, {9: 0.08}, 1)
    assert batched.seconds(9) == pytest.approx(alone.seconds(9), rel=0.01)


def test_drafting_hides_in_the_steps_of_others() -> None:
    """Where requests wait for the verifier in two groups, a draft that fits into the other group's step costs no time;
    alone it does."""
    policy = goodput(measured(dict.fromkeys((1, 2, 4, 8, 16, 32), 0.03)), seen(DraftCost(), {8: 0.024}, 50))
    assert best(policy.goodputs([0.5] * 8, Load(2, 2, num_turns=2.0))) == 8
    assert best(policy.goodputs([0.5] * 8, Load(1))) < 4


def test_a_probe_that_costs_much_waits_longer() -> None:
    """At most one percent of the time goes into probes: one that costs half a round comes once in fifty."""
    probes = Probes(after=1, at_most=1)
    assert sum(probes.is_due(0.5) for _ in range(1000)) <= 20


def test_drafts_that_are_rarely_offered_are_rarely_paid_for() -> None:
    """A pool whose drafters mostly abstain: half a token is offered per four asked for, and half of those are right.
    Verifying them costs next to nothing per round, so that a new request drafts although one token in eight is right;
    as many right ones among drafts that are always whole would not pay."""
    verify = measured({n: 1.0 + 0.3 * (n - 1) for n in range(1, 17)})
    first: dict[bool, int] = {}
    for are_whole in (False, True):
        offered = [4 if are_whole else 2 * (index % 4 == 0) for index in range(8)]
        samples = [RoundSample(4, number, 2 * (index == 0)) for index, number in enumerate(offered)]
        first[are_whole] = goodput(verify, pool=pooled(*samples, times=100, decay=0.995)).next_length(Load())
    assert first[False] > first[True] == 0


def test_what_did_not_pay_is_not_forgotten_to_be_there() -> None:
    """Nodes that were offered and not verified, because they did not pay under that load, count as offered."""
    cut, whole = (pooled(one, times=50) for one in (RoundSample(4, 0, 0, num_offered=4), RoundSample(4, 4, 0)))
    assert cut.offered == whole.offered == pytest.approx(1.0)


def test_drafts_of_which_nothing_is_sent_end() -> None:
    """C32: a busy verifier, and a vote that sends no node of what is drafted. Such drafts look free and bring nothing,
    whatever the acceptance of deeper tokens is taken to be: drafting stops, and comes back once it pays."""
    policy = goodput(measured(NEARLY_FREE))
    asked: list[int] = []
    for load in [Load(1)] * 15 + [Load(64)] * 60:
        asked.append(policy.next_length(load))
        policy.observe(RoundSample(asked[-1], 0, 0))
    assert min(asked[:15]) > 0
    assert asked[-20:] == [0] * 20
    assert max(rounds(policy, 1.0, 600)[-10:]) > 0


def test_a_draft_that_may_come_late_is_made_shorter() -> None:
    """Two groups whose drafts fit just into each other's steps: with steady durations the longest, with varying ones,
    which make many miss their step, a shorter one."""
    chosen = []
    for wobble in (0.0, 0.3):
        verify, draft = VerifyCost(), DraftCost()
        for factor in (1 - wobble, 1 + wobble) * 200:
            seen(verify, dict.fromkeys((1, 2, 4, 8, 16, 32), 0.03 * factor), 1)
            seen(draft, {length: 0.0035 * length * factor for length in (2, 4, 8)}, 1)
        chosen.append(best(goodput(verify, draft).goodputs([0.8] * 8, Load(2, 2, num_turns=2.0))))
    assert chosen[0] >= 7 > chosen[1]


def test_requests_wait_for_the_router_while_it_drafts_for_one_another() -> None:
    """What drafting takes of the router's own time is paid by every request that it serves: K that pays for one request
    alone is not chosen by sixteen that the router drafts for one after the other before their step may begin."""
    verify = measured({1: 0.012, 16: 0.013, 64: 0.015, 128: 0.02})
    busy = seen(DraftCost(), {length: 0.0005 * length for length in (1, 2, 4, 8)}, 10)
    loads = (Load(1), Load(16, 15, num_own=1.0), Load(16, 15, num_own=16.0))
    alone, apart, together = (goodput(verify, busy, router_cost=busy).next_length(load) for load in loads)
    assert min(alone, apart) > 0
    assert together == 0
