"""Verifiers that never wait, in simulated time, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import LoadClass, RandomTexts
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World

STEP_S = 0.030
ROUTER = RouterPlan(0.0, network_s=0.001, answer_s=0.0, tell_s=0.0, vote_s=0.0, later_s=0.0)
VERIFIER = VerifierPlan(StepCost.line(STEP_S, 0.0002, 64, 0.0), batching="free")
POOL = PoolPlan("d", 1, DraftTime(0.0, 0.003))


def run(*chances: float, concurrency: int = 4, pools: tuple[PoolPlan, ...] = (), **changes: object) -> SimulatedOutcome:
    values: dict[str, object] = {
        "verifier": VERIFIER,
        "pools": pools,
        "router": ROUTER,
        "concurrency": concurrency,
        "warm_up_s": 2.0,
        "measure_s": 10.0,
    }
    scenario = Scenario(**(values | changes))  # type: ignore[arg-type]  # one keyword at a time
    texts = RandomTexts([LoadClass(prompt_tokens=16, output_tokens=4000)], [(one,) for one in chances], 0.0, 7)
    return World(scenario, texts).run()


def of_plain(found: SimulatedOutcome, concurrency: int = 4) -> float:
    """Tokens per second, of one token a step for every request."""
    return found.tokens_per_s * STEP_S / concurrency


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("network_s", [0.001, 0.020])
def test_every_session_is_in_every_step(concurrency: int, network_s: float) -> None:
    """Without drafts a request has one token a step, however long a message takes."""
    found = run(concurrency=concurrency, router=replace(ROUTER, network_s=network_s))
    assert of_plain(found, concurrency) == pytest.approx(1.0, abs=0.01)
    assert found.requests_per_step == pytest.approx(concurrency, rel=0.01)


@pytest.mark.parametrize(("credit", "part"), [(1, 0.5), (2, 1.0), (64, 1.0)])
def test_credit_is_what_may_be_on_its_way(credit: int, part: float) -> None:
    """One token of credit: every second step passes until the router has heard. Two cover a message's way and back."""
    assert of_plain(run(router=replace(ROUTER, credit=credit))) == pytest.approx(part, abs=0.02)


def test_a_drafter_in_the_verifier_is_in_time_for_every_step() -> None:
    """Half of its tokens right, eight deep: two tokens a step but for what eight tokens cannot reach."""
    found = run(0.5, pools=(PoolPlan("d", place="verifier"),))
    assert found.tokens_per_round == pytest.approx(2.0, rel=0.03)
    assert of_plain(found) == pytest.approx(2.0, rel=0.03)


def test_a_drafter_that_is_always_right_keeps_ahead_of_the_verifier() -> None:
    """Ten tokens are drafted in each step of one request, so that steps verify all that its path may hold."""
    assert run(1.0, concurrency=1, pools=(POOL,)).tokens_per_round > 6


def test_attached_drafters_make_steps_longer_and_no_draft_late() -> None:
    """Their time is part of the step: tokens a round are those of the length, and a step takes as much more."""
    found = run(1.0, concurrency=1, pools=(replace(POOL, place="attached", time=DraftTime(0.0, 0.001)),))
    assert found.tokens_per_round == pytest.approx(9.0, rel=0.02)
    assert of_plain(found, 1) == pytest.approx(9 * STEP_S / (STEP_S + 0.008), rel=0.02)


def test_a_full_verifier_verifies_no_drafts_that_cost_more_than_they_bring() -> None:
    """96 requests, each row longer: guesses that are right once in five times are left out, by the price alone."""
    found = run(
        0.2, concurrency=96, pools=(PoolPlan("d", place="verifier"),), verifier=replace(VERIFIER, max_num_seqs=96)
    )
    assert found.nodes_per_round < 0.1
    assert found.tokens_per_s == pytest.approx(96 / (STEP_S + 32 * 0.0002), rel=0.02)


def test_waiting_pays_one_request_whose_drafts_come_in_a_moment() -> None:
    """3 ms of 30 bring the draft into the step that it was made for; with a drafter in the verifier nobody waits."""
    pool = replace(POOL, time=DraftTime(0.0, 0.0001), chunk=8)
    waits, goes = (
        run(0.4, concurrency=1, pools=(pool,), verifier=replace(VERIFIER, waits=one)) for one in (True, False)
    )
    assert waits.tokens_per_s > 1.1 * goes.tokens_per_s
    both = (pool, PoolPlan("local", place="verifier"))
    with_local, at_once = (
        run(0.4, 0.4, concurrency=1, pools=both, verifier=replace(VERIFIER, waits=one)) for one in (True, False)
    )
    assert with_local == at_once


def test_drafters_join_a_batch_at_its_next_token() -> None:
    """Eight requests with one drafter: nobody waits until the batch under way is done, as no real drafter does. Four
    tokens each take four steps of 3 ms and the one that was under way, not twice four."""
    verifier = VerifierPlan(StepCost.line(STEP_S, 0.0, 64), batching="ready")
    router = RouterPlan(0.0, 0.0, behind_s=0.0, network_s=0.001, num_speculative_tokens=4)
    found = run(0.75, concurrency=8, pools=(POOL,), verifier=verifier, router=router)
    assert found.draft_ms < 4 * 3 + 3 + 2 + 0.1


def test_lost_parts_cost_time_and_no_token() -> None:
    """Half of the verifiers and all drafters: every request goes on, elsewhere and without drafts."""
    found = run(
        0.9, pools=(POOL,), num_verifiers=2, fail_at_s=3.0, failed_verifiers=0.5, failed_drafters=1.0, warm_up_s=4.0
    )
    assert found.tokens_per_round == 1.0
    assert of_plain(found, 8) == pytest.approx(1.0, abs=0.01)


def test_one_seed_one_outcome() -> None:
    """The same again, with everything random in it."""
    verifier = replace(VERIFIER, noise=0.3)
    first, second = (run(0.7, concurrency=8, pools=(replace(POOL, noise=0.3),), verifier=verifier) for _ in range(2))
    assert first == second
