"""The simulation's parts against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moot.simulation.events import Cores, Server, Timeline
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import LoadClass, RandomTexts
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World


def test_actions_come_in_order_of_time_and_then_of_asking() -> None:
    """Two runs of one seed are equal only if nothing depends on how a heap orders equal times."""
    timeline, seen = Timeline(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("late", 9.0)):
        timeline.after(at, lambda name=name: seen.append((name, timeline.now)))
    timeline.run(5.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]
    assert timeline.now == 5.0


def test_a_server_works_one_job_after_the_other() -> None:
    """Two jobs that come at once end after one and after two times their work."""
    timeline, ends = Timeline(), []
    server = Server(timeline)
    server.work(1.0, lambda: ends.append(timeline.now))
    server.work(1.0, lambda: ends.append(timeline.now))
    timeline.run(10.0)
    assert ends == [1.0, 2.0]
    assert server.busy_s == 2.0


def test_shared_cores_slow_down_what_needs_all_of_them() -> None:
    """On two cores: a job of two threads beside a short one loses one core while that runs, and nothing afterwards."""
    timeline, ends = Timeline(), {}
    cores = Cores(timeline, 2)
    cores.run(1.0, 2, lambda: ends.setdefault("step", timeline.now))
    cores.run(0.2, 1, lambda: ends.setdefault("router", timeline.now))
    timeline.run(10.0)
    assert ends["router"] <= 0.3 + 1e-9
    assert 1.0 < ends["step"] <= 1.2 + 1e-9


def test_two_short_jobs_do_not_disturb_each_other_on_two_cores() -> None:
    """Each has a core of its own; a third makes all three share."""
    for count, expected in ((2, 1.0), (3, 1.5)):
        timeline, ends = Timeline(), []
        cores = Cores(timeline, 2)
        for _ in range(count):
            cores.run(1.0, 1, lambda timeline=timeline, ends=ends: ends.append(timeline.now))
        timeline.run(10.0)
        assert ends == pytest.approx([expected] * count)


def test_step_costs_are_straight_between_measured_points() -> None:
    """In rows and in requests; a line is flat up to its free rows; prefill is added."""
    cost = StepCost({1: [(1, 1.0), (5, 2.0)], 3: [(3, 2.0), (15, 5.0)]}, 0.1)
    assert cost.seconds(3, 1) == pytest.approx(1.5)
    assert cost.seconds(9, 1) == pytest.approx(3.0)
    assert cost.seconds(3, 3) == pytest.approx(2.0)
    assert cost.seconds(3, 2) == pytest.approx((1.5 + 2.0) / 2)
    assert cost.seconds(3, 1, 10) == pytest.approx(2.5)
    line = StepCost.line(0.03, 0.001, 16)
    assert line.seconds(16, 4) == pytest.approx(0.03)
    assert line.seconds(26, 4) == pytest.approx(0.04)
    longer = StepCost({1: [(1, 1.0)]}, 0.0, 0.002)
    assert longer.seconds(1, 1, context_tokens=500) == pytest.approx(2.0)
    assert longer.stretched(2.0).seconds(1, 1, context_tokens=500) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="needs points"):
        StepCost({1: []})


def run(
    chance: float = 1.0,
    *,
    length: int | None = 4,
    concurrency: int = 1,
    step: StepCost | None = None,
    **changes: object,
) -> SimulatedOutcome:
    values: dict[str, object] = {
        "verifier": VerifierPlan(step or StepCost.line(0.030, 0.0, 64)),
        "pools": (PoolPlan("d", concurrency, DraftTime(0.0, 0.003)),),
        "router": RouterPlan(open_s=0.0, round_s=0.0, behind_s=0.0, network_s=0.001, num_speculative_tokens=length),
        "concurrency": concurrency,
        "warm_up_s": 2.0,
        "measure_s": 20.0,
    }
    scenario = Scenario(**(values | changes))  # type: ignore[arg-type]  # one keyword at a time
    return World(scenario, RandomTexts([LoadClass(output_tokens=4000)], [(chance,)], 0.0, 7)).run()


def test_one_request_takes_the_sum_of_its_parts() -> None:
    """All accepted: 5 tokens in 4 x 3 ms of drafting, 30 ms of verifying and four ways of 1 ms; none accepted: 1."""
    assert run(1.0).tokens_per_s == pytest.approx(5 / 0.046, rel=0.02)
    assert run(0.0).tokens_per_s == pytest.approx(1 / 0.046, rel=0.02)
    assert run(0.0, length=0).tokens_per_s == pytest.approx(1 / 0.032, rel=0.02)


def test_the_chance_of_a_token_is_what_was_asked_for() -> None:
    """Half of the tokens right: 1 + 1/2 + 1/4 + 1/8 + 1/16 tokens per round."""
    assert run(0.5, measure_s=200.0).tokens_per_round == pytest.approx(1.9375, rel=0.03)


def test_drafting_ahead_hides_drafting_where_all_is_accepted() -> None:
    """The next proposal is drafted while the verifier works: a round costs the step and the ways."""
    pools = (PoolPlan("d", 1, DraftTime(0.0, 0.003), ahead_tokens=8),)
    found = run(1.0, pools=pools)
    assert found.from_ahead > 0.9
    assert found.tokens_per_s == pytest.approx(5 / 0.034, rel=0.08)


def test_a_step_waits_for_those_who_are_about_to_come() -> None:
    """Requests that come back within a fifth of a step fall into two groups where nothing waits, and share every step
    where the verifier gathers them by its own rule; one that takes longer than the longest wait is left out."""
    step = StepCost.line(0.030, 0.0, 64)
    waits = {
        (name, network_s): run(
            0.0,
            length=0,
            concurrency=4,
            verifier=VerifierPlan(step, batching=name),
            router=RouterPlan(0.0, 0.001, behind_s=0.0, network_s=network_s, num_speculative_tokens=0),
        )
        for name in ("ready", "gathered")
        for network_s in (0.001, 0.02)
    }
    assert waits["ready", 0.001].requests_per_step <= 2.1
    assert waits["gathered", 0.001].requests_per_step >= 3.9
    assert waits["gathered", 0.001].tokens_per_s > 1.5 * waits["ready", 0.001].tokens_per_s
    assert waits["gathered", 0.02].tokens_per_s == pytest.approx(waits["ready", 0.02].tokens_per_s, rel=0.02)


def test_a_router_s_work_counts_where_it_is_waited_for() -> None:
    """Before asking and before verifying it makes rounds longer, behind the questions it does not; asking costs only
    rounds that ask."""
    plain = RouterPlan(0.0, 0.0, behind_s=0.0, network_s=0.001, num_speculative_tokens=4)
    rounds = {
        name: run(router=router).round_ms
        for name, router in {
            "plain": plain,
            "front": replace(plain, round_s=0.004),
            "asking": replace(plain, ask_s=0.004),
            "behind": replace(plain, behind_s=0.004),
            "not asking": replace(plain, ask_s=0.004, num_speculative_tokens=0),
        }.items()
    }
    assert rounds["plain"] == pytest.approx(46.0, abs=0.1)
    assert rounds["front"] == pytest.approx(50.0, abs=0.1)
    assert rounds["asking"] == pytest.approx(50.0, abs=0.1)
    assert rounds["behind"] == pytest.approx(46.0, abs=0.1)
    assert rounds["not asking"] == pytest.approx(32.0, abs=0.1)


def test_halves_in_turns_hide_drafting_in_each_others_steps() -> None:
    """Sixteen requests, all together: draft, then step. Two halves: steps without a pause between them."""
    step = StepCost.line(0.030, 0.001, 0)
    both = {
        name: run(concurrency=16, verifier=VerifierPlan(step, batching=name), step=step) for name in ("whole", "dual")
    }
    assert both["dual"].verifier_utilisation > 0.98 > both["whole"].verifier_utilisation + 0.02


def test_one_seed_one_outcome() -> None:
    """The same again, with everything random in it."""
    first, second = (run(0.7, length=None, concurrency=8, measure_s=5.0) for _ in range(2))
    assert first == second


def test_lost_drafters_cost_time_and_no_token() -> None:
    """All replicas lost: requests go on without drafts, and each is finished."""
    found = run(1.0, concurrency=4, fail_at_s=1.0, failed_drafters=1.0, warm_up_s=3.0)
    assert found.tokens_per_round == 1.0
    assert found.tokens_per_s > 20


def test_requests_of_a_lost_verifier_go_on_elsewhere() -> None:
    """Half of the verifiers lost: every request of theirs is moved and none stops."""
    found = run(0.5, concurrency=4, num_verifiers=2, fail_at_s=3.0, failed_verifiers=0.5, measure_s=5.0)
    assert found.num_moves == 4
    assert found.over_time[-1][1] > 0
