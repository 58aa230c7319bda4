"""When a step waits for drafts: where that pays, and never for what does not come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.stepping.draft_wait import DraftWait

STEP_S = 0.030


def learned(turnaround_s: float, first: float) -> DraftWait:
    wait = DraftWait()
    for number in range(50):
        wait.answered("s", number, float(number))
        wait.came("s", number, first, number + turnaround_s)
    return wait


def left(wait: DraftWait, sessions: int, tokens: float = 1.4, at: float = 100.0) -> float:
    """How long a step waits that could begin at 100 s, where a usual one brings `tokens` a session."""
    return wait.seconds_left(at, 100.0, sessions, sessions * tokens / STEP_S, STEP_S)


def test_one_request_waits_for_a_draft_that_takes_a_tenth_of_a_step() -> None:
    """3 ms cost a tenth of a step; the draft's first token and what follows bring more than that."""
    wait = learned(0.003, 0.35)
    wait.answered("s", 7, 100.0)
    assert left(wait, 1) == pytest.approx(0.003, rel=0.1)
    assert left(wait, 1, at=100.004) == 0


def test_nothing_is_waited_for_that_costs_more_than_it_brings() -> None:
    """One of sixteen has no draft: the others would pay. A draft that takes longer than a step is none to wait for."""
    wait = learned(0.003, 0.35)
    wait.answered("s", 7, 100.0)
    assert left(wait, 16) == 0
    late = learned(0.040, 0.9)
    late.answered("s", 7, 100.0)
    assert left(late, 1) == 0


def test_only_those_are_waited_for_whose_draft_has_not_come() -> None:
    """A draft that came, a session that ended, and one for an older text each leave nothing to wait for."""
    for what in ("came", "ended"):
        wait = learned(0.003, 0.35)
        wait.answered("s", 7, 100.0)
        if what == "came":
            wait.came("s", 6, 0.35, 100.001)
            assert left(wait, 1) > 0
            wait.came("s", 7, 0.35, 100.001)
        else:
            wait.ended("s")
        assert left(wait, 1) == 0


def test_drafters_that_are_gone_are_soon_not_waited_for() -> None:
    """A few texts without a draft, and steps begin at once; when drafts come again waiting does too."""
    wait = learned(0.003, 0.35)
    for number in range(30):
        wait.answered("s", 60 + number, 100.0)
    assert left(wait, 1) == 0
    for number in range(30):
        wait.came("s", 89 + number, 0.35, 100.003)
        wait.answered("s", 90 + number, 100.0)
    assert left(wait, 1) > 0


@given(
    st.lists(st.floats(0, 0.05), max_size=8),
    st.floats(0.001, 0.04),
    st.floats(0.05, 1.0),
    st.integers(0, 8),
    st.floats(1.0, 3.0),
)
def test_a_wait_has_an_end_and_brings_more_than_it_costs(
    ages: list[float], turnaround_s: float, first: float, others: int, tokens: float
) -> None:
    """Whatever is on its way: never beyond a step's time, and at most as long as what it brings is worth to all."""
    wait = learned(turnaround_s, first)
    for number, age in enumerate(ages):
        wait.answered(number, 1, 100.0 - age)
    sessions = max(len(ages) + others, 1)
    waited = left(wait, sessions, tokens)
    assert 0 <= waited <= STEP_S + 1e-9
    assert waited * sessions * tokens / STEP_S <= len(ages) * (first + tokens - 1) + 1e-6


def test_before_anything_is_known_nothing_is_waited_for() -> None:
    """A verifier whose routers never send a draft begins every step at once."""
    wait = DraftWait()
    wait.answered("s", 7, 100.0)
    assert left(wait, 1) == 0
