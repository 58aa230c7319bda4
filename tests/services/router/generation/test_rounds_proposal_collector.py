"""When a round stops waiting for its drafters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from moot.core.types import Proposal
from services.router.generation.ports import ProposalCollector
from tests.waiting import GIVE_UP_S


@dataclass(frozen=True)
class Voter:
    """A drafter that is only counted: the box never calls one."""

    drafter_id: str


A, B, C = Voter("a"), Voter("b"), Voter("c")
CHAIN = (Proposal((1, 2), (9, 9), "a"),)
LONG = 3600.0


def box(
    soft_s: float, hard_s: float, quorum: float = 0.5, request_drafters: tuple[Voter, ...] = (A, B, C)
) -> ProposalCollector:
    made = ProposalCollector(asyncio.get_running_loop(), soft_s=soft_s, hard_s=hard_s, quorum=quorum)
    for voter in request_drafters:
        made.expect(voter)
    return made


async def test_closes_when_all_have_answered() -> None:
    """Nobody waits for a deadline when all have answered, be it before or while the box is being closed."""
    early = box(LONG, LONG)
    for voter in (A, B, C):
        assert early.cast(voter, CHAIN)
    assert await asyncio.wait_for(early.close(), GIVE_UP_S) == frozenset()
    later = box(LONG, LONG)
    closing = asyncio.create_task(later.close())
    await asyncio.sleep(0)
    for voter in (A, B, C):
        later.cast(voter, CHAIN)
    assert await asyncio.wait_for(closing, GIVE_UP_S) == frozenset()
    assert [voter for voter, _ in later.proposals] == [A, B, C]


async def test_soft_deadline_needs_a_quorum() -> None:
    """After the soft deadline a quorum suffices; before it, or without one, the box waits on."""
    quorate = box(0.01, LONG)
    quorate.cast(A, CHAIN)
    quorate.cast(B, ())
    assert await asyncio.wait_for(quorate.close(), GIVE_UP_S) == {C}
    waiting = box(0.01, LONG)
    waiting.cast(A, CHAIN)
    closing = asyncio.create_task(waiting.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    waiting.cast(B, CHAIN)
    assert await asyncio.wait_for(closing, GIVE_UP_S) == {C}


async def test_hard_deadline_ends_it() -> None:
    """After the hard deadline the round goes on with whatever came, nothing included."""
    assert await asyncio.wait_for(box(0.01, 0.02).close(), GIVE_UP_S) == {A, B, C}


async def test_lost_drafters_are_not_waited_for() -> None:
    """A drafter that is lost while it is asked leaves the count: the others, or nobody, decide."""
    made = box(LONG, LONG)
    closing = asyncio.create_task(made.close())
    await asyncio.sleep(0)
    for voter in (A, B, C):
        made.withdraw(voter)
    assert await asyncio.wait_for(closing, GIVE_UP_S) == frozenset()
    assert made.num_asked == 0


async def test_late_doubled_and_unasked_answers_are_refused() -> None:
    """Each drafter counts once, and only before the box closes."""
    made = box(LONG, LONG, request_drafters=(A,))
    assert made.cast(A, CHAIN)
    assert not made.cast(A, CHAIN)
    assert not made.cast(B, CHAIN)
    await made.close()
    late = box(0.0, 0.0, request_drafters=(A,))
    await late.close()
    assert not late.cast(A, CHAIN)
    assert late.proposals == []
