"""Which sessions a step waits for, on plain numbers; and with a real engine, that a long prompt leaves nobody out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from moot.core.batching_delay import BatchingDelay
from moot.core.types import SamplingParams
from tests.services.verifier.local_sessions import LocalSession
from tests.services.verifier.verifier_driver import MakeEngine
from tests.waiting import GIVE_UP_S

STEP = 100
STEP_S = 0.1


def test_a_step_waits_for_those_just_answered_and_for_no_longer_than_its_share() -> None:
    """Until the last of them is back; never past the share of the last step's time."""
    batching_delay = BatchingDelay(0.5)
    batching_delay.stepped(STEP)
    for session in (1, 2):
        batching_delay.answered(session, 1000)
    assert batching_delay.seconds_left(1000) == 50e-9
    batching_delay.came(1, 1010)
    assert batching_delay.seconds_left(1020) == 30e-9
    batching_delay.came(2, 1020)
    assert batching_delay.seconds_left(1020) == 0
    batching_delay.answered(1, 1020)
    assert batching_delay.seconds_left(1100) == 0


def test_whoever_is_usually_slow_is_not_waited_for() -> None:
    """A reader that takes longer than the share costs the others one wait, not one in each step."""
    batching_delay = BatchingDelay(0.5)
    waits = []
    for step in range(5):
        batching_delay.stepped(STEP)
        batching_delay.answered(1, 1000 * step)
        waits.append(batching_delay.seconds_left(1000 * step) > 0)
        batching_delay.came(1, 1000 * step + 400)
    assert waits == [True, False, False, False, False]


def test_whoever_is_usually_quick_is_given_up_soon() -> None:
    """Twice its usual turnaround and a quarter of the share, whichever is more: not the whole share."""
    batching_delay = BatchingDelay(0.4)
    for usual, wait in ((15, 30e-9), (2, 10e-9)):
        batching_delay.stepped(STEP)
        batching_delay.answered(usual, 0)
        batching_delay.came(usual, usual)
        batching_delay.answered(usual, 2000)
        assert batching_delay.seconds_left(2000) == wait


def test_a_new_step_forgets_whom_the_last_one_waited_for() -> None:
    """Each answer is waited for once."""
    batching_delay = BatchingDelay(1.0)
    batching_delay.stepped(STEP)
    batching_delay.answered(1, 0)
    batching_delay.stepped(STEP)
    assert batching_delay.seconds_left(0) == 0


def test_without_a_share_nobody_is_waited_for() -> None:
    """0 switches it off."""
    batching_delay = BatchingDelay(0.0)
    batching_delay.stepped(STEP)
    batching_delay.answered(1, 0)
    assert batching_delay.seconds_left(0) == 0


@given(st.lists(st.tuples(st.sampled_from(["answered", "came", "ended", "stepped"]), st.integers(0, 5)), max_size=60))
def test_nothing_is_kept_of_sessions_that_have_ended(events: list[tuple[str, int]]) -> None:
    """Whatever happened in whatever order, the tables hold open sessions only."""
    batching_delay = BatchingDelay(0.5)
    for now, (kind, session) in enumerate(events):
        if kind == "stepped":
            batching_delay.stepped(STEP)
        elif kind == "ended":
            batching_delay.ended(session)
        else:
            getattr(batching_delay, kind)(session, now)
    for session in range(6):
        batching_delay.ended(session)
    assert len(batching_delay) == 0
    assert batching_delay.seconds_left(0) == 0


def test_a_long_prompt_leaves_no_running_request_out_of_a_step(make_engine: MakeEngine) -> None:
    """While a prompt is read in many chunks, a request that answers back at once is in nearly every step with a chunk:
    it waits for one chunk, not for two. Told from the steps; without the wait it is in every other one."""
    engine = make_engine(pages=64, prefill_chunk_tokens=32, max_num_batched_tokens=256, batching_delay_share=1.0)
    batches: list[tuple[bool, int]] = []
    inner = engine.serving.steps.run

    def run(items: object) -> object:
        kinds = [item.completes and not item.session.work.is_opening for item in items]  # type: ignore[attr-defined]
        batches.append((not all(kinds), sum(kinds)))
        # As long as a real step: the rule is about requests that come back sooner than a step takes.
        time.sleep(STEP_S)
        return inner(items)  # type: ignore[arg-type]

    engine.serving.steps.run = run  # type: ignore[method-assign, assignment]
    engine.start()
    ended = threading.Event()

    def rounds(number: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        with LocalSession(engine, [number, 2, 3], params) as session:
            session.open()
            while not ended.is_set() and session.verify().finish_reason is None:
                pass

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(rounds, number) for number in (1, 2)]
        try:
            prompt = [index * index % 256 for index in range(1000)]
            with LocalSession(engine, prompt, SamplingParams(temperature=0.0, max_tokens=1)) as long:
                long.open()
        finally:
            ended.set()
        for one in running:
            one.result(GIVE_UP_S)
    chunks = [count for has_chunk, count in batches if has_chunk]
    assert len(chunks) >= 30
    served, due = sum(chunks), 2 * len(chunks)
    assert 4 * served >= 3 * due, f"{served} of {due} rounds that could have been in a step with a chunk were"
