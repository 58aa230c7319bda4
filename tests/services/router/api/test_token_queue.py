"""The queue of tokens, its service rate, the places of verifiers and an answer's buffer, on a clock that is moved."""

from __future__ import annotations

import asyncio

import pytest

from moot.core.errors import NoCapacity, RateLimited
from moot.core.types import TokenLogprobs
from moot.runtime.metrics import Metrics
from services.router.api.admission import MOST_RETRY_S, Admission, CallerLoad, TokenQueue
from services.router.api.choices import ChunkQueue, size_of
from services.router.api.settings import HttpSettings
from services.router.generation.request_types import GenerationChunk, Places


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, *, max_tokens_per_caller: int = 400, shed_share: float = 0.5) -> TokenQueue:
    settings = HttpSettings(
        max_queued_tokens=1000,
        max_queued_tokens_per_key=max_tokens_per_caller,
        shed_share=shed_share,
        retry_after_s=2,
    )
    return TokenQueue(settings, clock=clock)


def test_bounds_over_all_and_per_caller() -> None:
    """A refusal changes nothing; who is above a bound alone is let in when nothing else waits; without a key nobody has
    a share of his own; leaving twice counts once."""
    queue = make(Clock())
    (first,) = queue.put("a", [300])
    with pytest.raises(RateLimited) as own:
        queue.put("a", [60, 60])
    assert own.value.shortage == "caller_tokens"
    places = [*queue.put("b", [400]), *queue.put("c", [200, 100])]
    with pytest.raises(NoCapacity) as full:
        queue.put("d", [1])
    assert full.value.shortage == "tokens"
    assert queue.num_tokens == 1000
    for place in (first, *places, first):
        place.leave()
    assert queue.num_tokens == 0
    (huge,) = queue.put("a", [5000])
    with pytest.raises(NoCapacity):
        queue.put("b", [1])
    huge.leave()
    for _ in range(5):
        queue.put("", [190])
    assert queue.num_tokens == 950


def test_the_time_to_come_again_is_the_measured_one() -> None:
    """Excess over the rate at which tokens have left while some waited. Time in which nobody waited says nothing, a
    standstill makes it longer, and it has bounds."""
    clock = Clock()
    queue = make(clock, max_tokens_per_caller=1000)

    def retry_after_s(amount: int) -> float:
        with pytest.raises(NoCapacity) as caught:
            queue.check("x", amount)
        return caught.value.retry_after_s

    (place,) = queue.put("a", [1000])
    assert retry_after_s(1) == 2, "nothing was measured"
    for _ in range(20):
        clock.now += 2.0
        place.leave()
        clock.now += 500.0
        (place,) = queue.put("a", [1000])
    assert retry_after_s(1000) == pytest.approx(2.0, rel=0.1), "500 tokens a second of the time in which some waited"
    assert retry_after_s(5000) == pytest.approx(10.0, rel=0.1)
    assert retry_after_s(10) == 1.0
    clock.now += 60.0
    assert 15 < retry_after_s(1000) <= MOST_RETRY_S
    clock.now += 3600.0
    assert retry_after_s(1000) == MOST_RETRY_S


def test_a_caller_s_share_of_the_service_is_his_share_of_the_queue() -> None:
    """Over his own limit he is sent away for longer, the more of the queue is others'."""
    clock = Clock()
    queue = make(clock)
    queue.put("b", [300])
    (place,) = queue.put("a", [300])
    clock.now += 1.0
    place.leave()
    queue.put("a", [300])
    with pytest.raises(RateLimited) as caught:
        queue.check("a", 700)
    assert caught.value.retry_after_s == pytest.approx(600 * 2 / 300)


def test_drafting_stops_at_the_share_and_goes_on_at_half_of_it() -> None:
    """Between the two levels nothing changes, so that it does not flicker; at 1 it never stops, at 0 as soon as
    anything waits."""
    queue = make(Clock(), max_tokens_per_caller=1000)
    seen = []
    places = []
    for _ in range(8):
        places += queue.put("a", [100])
        seen.append(queue.is_shedding)
    for place in places:
        place.leave()
        seen.append(queue.is_shedding)
    assert seen == [False] * 5 + [True] * 3 + [True] * 5 + [False] * 3
    never, always = make(Clock(), shed_share=1), make(Clock(), shed_share=0)
    for queue in (never, always):
        queue.put("a", [400])
    assert (never.is_shedding, always.is_shedding) == (False, True)


def test_a_rate_without_service_has_no_estimate() -> None:
    """What is told then is what the settings say, within bounds; time without any load counts for nothing."""
    clock = Clock()
    load = CallerLoad(clock)
    load.add("a", 90)
    clock.now += 3.0
    assert (load.retry_after_s(1, 7.0), load.retry_after_s(1, 0.1), load.retry_after_s(1, 1e9)) == (
        7.0,
        1.0,
        MOST_RETRY_S,
    )
    load.serve("a", 30)
    assert load.retry_after_s(20, 7.0) == pytest.approx(2.0)
    assert load.retry_after_s(None, 7.0) == 7.0
    load.serve("a", 60)
    clock.now += 500.0
    assert (load.retry_after_s(90, 7.0), load.total, dict(load.of_callers)) == (pytest.approx(3.0), 0, {})


async def test_places_of_verifiers_bound_what_is_in_flight() -> None:
    """One more than they hold is refused, unless it is a request that is alone; more than the share of their waiting
    places stops drafting; a verifier that is gone takes its places with it."""
    room = [Places(4, 8)]
    clock = Clock()
    settings = HttpSettings(served_model_names=("m",))
    metrics = Metrics()
    admission = Admission(settings, metrics, lambda: room[0], clock)
    tickets = []
    shedding = []
    for _ in range(12):
        tickets.append(admission.enter("a"))
        shedding.append(admission.is_shedding)
    assert shedding == [False] * 8 + [True] * 4
    assert metrics.degraded.labels("no_speculation")._value.get() == 1  # type: ignore[no-untyped-call]
    with pytest.raises(NoCapacity) as caught:
        admission.enter("b")
    assert caught.value.shortage == "places"
    room[0] = Places(2, 4)
    for ticket in tickets[:5]:
        clock.now += 0.5
        ticket.__exit__(None, None, None)
    with pytest.raises(NoCapacity) as caught:
        admission.enter("b")
    assert caught.value.retry_after_s == pytest.approx(1.0), "two have to end, of two a second"
    for ticket in tickets[5:]:
        ticket.__exit__(None, None, None)
    assert not admission.is_shedding
    with admission.enter("b") as ticket:
        ticket.grow(20)
        with pytest.raises(NoCapacity):
            admission.enter("c")
    assert admission.num_in_flight == 0


async def test_an_answer_s_buffer_is_bounded_in_bytes() -> None:
    """Writers wait while it is full, in turns, and nothing is lost or out of order; what has many log-probabilities
    counts for more."""
    top = tuple((number, -1.0) for number in range(20))
    small = GenerationChunk("a", (1,))
    large = GenerationChunk("a", (1,), (TokenLogprobs(-1.0, 1, top),))
    assert size_of(large) > 4 * size_of(small)
    queue: ChunkQueue[tuple[int, int]] = ChunkQueue(1000)
    written = 0

    async def write(writer: int) -> None:
        nonlocal written
        for number in range(50):
            await queue.put((writer, number), 300)
            written += 1

    tasks = [asyncio.create_task(write(writer)) for writer in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert written == 4, "the fourth went over the bound"
    got = [await queue.get() for _ in range(150)]
    await asyncio.gather(*tasks)
    assert [number for writer, number in got if writer == 1] == list(range(50))
    assert sorted(got) == [(writer, number) for writer in range(3) for number in range(50)]
