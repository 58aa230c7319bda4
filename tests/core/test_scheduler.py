"""The scheduler's rules on plain data: no tensor, no thread, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.scheduler import Batch, Limits, Scheduler


@dataclass(eq=False)
class Job:
    """A session as far as the scheduler is concerned; `feed` does to it what a step does."""

    arrival: int
    length: int
    cached: int = 0
    num_draft_tokens: int = 0
    has_work: bool = True
    holds_kv: bool = False

    @property
    def num_kv_tokens(self) -> int:
        return self.length + self.num_draft_tokens

    @property
    def num_missing(self) -> int:
        return self.length - self.cached

    def verify(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens, self.has_work = num_draft_tokens, True


def limits(**changes: int) -> Limits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "prefill_chunk_tokens": 16,
        "num_pages": 100,
        "page_tokens": 8,
    }
    return Limits(**(values | changes))


def scheduler_of(*jobs: Job, **changes: int) -> Scheduler[Job]:
    scheduler: Scheduler[Job] = Scheduler(limits(**changes))
    for job in jobs:
        scheduler.submit(job)
    return scheduler


def plan(scheduler: Scheduler[Job]) -> Batch[Job]:
    """The beginning of a step as the verifier does it."""
    changes = scheduler.rearrange()
    for job in changes.preempted:
        job.cached, job.holds_kv = 0, False
    for job in changes.admitted:
        job.holds_kv = True
    return scheduler.plan()


def feed(batch: Batch[Job]) -> None:
    for item in batch.items:
        item.session.cached += item.num_prefix_tokens
        if item.completes:
            # All but the next token got KV: accepted drafts are worth one page of growth at most here.
            item.session.length += 1 + item.session.num_draft_tokens
            item.session.cached = item.session.length - 1
            item.session.num_draft_tokens, item.session.has_work = 0, False


def test_a_long_prompt_delays_a_verification_by_one_chunk_only() -> None:
    """Each batch that carries a chunk of a long prompt carries every verification that waits."""
    short, long = Job(0, 4), Job(1, 400)
    scheduler = scheduler_of(short)
    feed(plan(scheduler))
    scheduler.submit(long)
    for _ in range(10):
        short.verify(3)
        scheduler.submit(short)
        batch = plan(scheduler)
        tokens = {item.session.arrival: item.num_tokens for item in batch.items}
        assert tokens == {0: 4, 1: 16}
        feed(batch)


def test_a_short_prompt_behind_a_long_one_gets_the_next_chunk() -> None:
    """Prefills take turns: the newcomer is not behind the rest of the long prompt."""
    long, short = Job(0, 400), Job(1, 5)
    scheduler = scheduler_of(long)
    feed(plan(scheduler))
    scheduler.submit(short)
    for _ in range(2):
        feed(plan(scheduler))
    assert not short.has_work


def test_verifications_over_the_budget_are_served_longest_waiting_first() -> None:
    """No session is passed over twice: the batch budget moves on to those left out."""
    jobs = [Job(number, 4, cached=3, num_draft_tokens=15) for number in range(4)]
    scheduler = scheduler_of(*jobs, max_num_batched_tokens=33)
    first = plan(scheduler)
    assert [item.session.arrival for item in first.items] == [0, 1]
    feed(first)
    for job in jobs[:2]:
        job.verify(15)
        scheduler.submit(job)
    second = plan(scheduler)
    assert [item.session.arrival for item in second.items] == [2, 3]


def test_a_draft_waits_until_its_prefix_is_there() -> None:
    """After a preemption the prefix is filled as a chain, then the draft is verified in a batch of its own."""
    job = Job(0, 20, cached=0, num_draft_tokens=5)
    scheduler = scheduler_of(job)
    seen = []
    while job.has_work:
        batch = plan(scheduler)
        seen.append([(item.num_prefix_tokens, item.completes) for item in batch.items])
        feed(batch)
    assert seen == [[(16, False)], [(3, False)], [(1, True)]]


def test_admission_is_in_order_of_age_and_bounded_by_pages_and_places() -> None:
    """A small session does not overtake a large one that waits for pages."""
    scheduler = scheduler_of(Job(0, 40), Job(1, 48), Job(2, 8), num_pages=10)
    assert [job.arrival for job in scheduler.rearrange().admitted] == [0]
    assert scheduler.num_waiting == 2


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    """KV that ran out is taken from the youngest; it waits before everybody who came later."""
    old, young = Job(0, 14), Job(1, 14)
    scheduler = scheduler_of(old, young, num_pages=4)
    for _ in range(2):
        feed(plan(scheduler))
    assert (old.cached, young.cached) == (14, 14)
    scheduler.submit(late := Job(2, 3))
    for job in (old, young):
        job.verify(3)
        scheduler.submit(job)
    assert scheduler.rearrange().preempted == (young,)
    young.cached = 0
    batch = scheduler.plan()
    assert [item.session for item in batch.items] == [old]
    feed(batch)
    scheduler.remove(old)
    assert scheduler.rearrange().admitted == (young, late)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=9),
    st.integers(9, 20),
    st.integers(0, 10**6),
)
def test_everybody_is_served_and_every_bound_holds(
    plans: list[tuple[int, list[int]]], num_pages: int, seed: int
) -> None:
    """For any mix of prompts and drafts: budgets, places and pages hold at each step, and all work gets done."""
    bounds = limits(num_pages=num_pages, max_num_batched_tokens=28)
    jobs = [Job(number, length) for number, (length, _) in enumerate(plans)]
    scheduler = scheduler_of(*jobs, num_pages=num_pages, max_num_batched_tokens=28)
    drafts = [list(rest) for _, rest in plans]
    draw = random.Random(seed)
    for _ in range(400):
        batch = plan(scheduler)
        fed = [item.session for item in batch.items]
        assert len(fed) == len(set(map(id, fed))) <= bounds.max_num_seqs
        assert batch.num_tokens <= bounds.max_num_batched_tokens
        assert scheduler.num_used_pages <= num_pages
        assert all(job.holds_kv for job in fed)
        prefill = sum(item.num_prefix_tokens for item in batch.items if item.session.num_missing > 1)
        assert prefill <= bounds.prefill_chunk_tokens
        assert batch.items or not any(job.has_work and job.holds_kv for job in jobs)
        feed(batch)
        for job in jobs:
            if not job.has_work and job.arrival >= 0:
                if drafts[job.arrival]:
                    if draw.random() < 0.5:
                        job.verify(drafts[job.arrival].pop())
                        scheduler.submit(job)
                else:
                    scheduler.remove(job)
        if not scheduler.has_work and not any(drafts):
            break
    assert not any(drafts)
    for job in jobs:
        scheduler.remove(job)
    assert scheduler.num_admitted == scheduler.num_waiting == scheduler.num_used_pages == 0
