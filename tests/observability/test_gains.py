"""The estimate of what plain decoding would have taken errs towards speculation, and follows what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.types import Verification
from services.router.generation.counters import PlainTimes


def step(requests: int, tokens: int, forward_ms: int, queue_ms: int = 0, prefill: int = 0) -> Verification:
    return Verification(
        base_length=10,
        num_accepted=0,
        output_token_ids=(1,),
        forward_us=forward_ms * 1000,
        queue_us=queue_ms * 1000,
        batch_requests=requests,
        batch_tokens=tokens,
        batch_prefill_tokens=prefill,
    )


def test_without_a_plain_step_its_time_is_that_of_the_step_with_drafts() -> None:
    """Nobody knows better: then only the draft stage can make speculation look bad."""
    assert PlainTimes().estimate(step(1, 9, forward_ms=20), 5, 0.021) == pytest.approx(5 * 0.021)


def test_a_plain_step_that_was_seen_counts() -> None:
    """A step with drafts that takes 30 ms, where a plain one takes 10: five tokens in 31 ms, plainly in 5 times 11."""
    times = PlainTimes()
    times.estimate(step(1, 1, forward_ms=10), 1, 0.011)
    assert times.estimate(step(1, 9, forward_ms=30), 5, 0.031) == pytest.approx(5 * 0.011)


def test_who_waits_for_a_step_waits_for_the_drafts_in_it() -> None:
    """A queue of steps three times as long is three times as long."""
    times = PlainTimes()
    times.estimate(step(4, 4, forward_ms=10), 1, 0.011)
    assert times.estimate(step(3, 27, forward_ms=30, queue_ms=30), 1, 0.061) == pytest.approx(0.021)


def test_prompts_in_a_step_say_nothing() -> None:
    """A step that reads a prompt is long for another reason, and is no plain step."""
    times = PlainTimes()
    times.estimate(step(1, 1, forward_ms=10), 1, 0.011)
    assert times.estimate(step(1, 265, forward_ms=90, prefill=256), 1, 0.091) == pytest.approx(0.091)
    times.estimate(step(2, 258, forward_ms=90, prefill=256), 1, 0.091)
    assert times.estimate(step(2, 10, forward_ms=20), 1, 0.021) == pytest.approx(0.021)


steps = st.builds(
    step,
    st.integers(0, 40),
    st.integers(0, 400),
    st.integers(0, 200),
    st.integers(0, 200),
    st.sampled_from([0, 0, 16]),
)


@given(st.lists(st.tuples(steps, st.integers(1, 9), st.floats(0, 1)), max_size=20))
def test_the_estimate_is_never_below_zero_nor_above_a_round_for_each_token(
    rounds: list[tuple[Verification, int, float]],
) -> None:
    """Whatever verifiers report: a gain is never made up out of their numbers."""
    times = PlainTimes()
    for verification, num_tokens, seconds in rounds:
        assert -1e-9 <= times.estimate(verification, num_tokens, seconds) <= num_tokens * seconds + 1e-9
