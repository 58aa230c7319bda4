"""Draft-ahead: what is kept of a path, whose turn it is, and that it costs nobody anything."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from moot.core.options import make_config
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.testing.scripted_kind import ScriptedKind
from services.drafter.config import DrafterConfig
from services.drafter.drafter_sessions import Path, Settled
from services.drafter.drafting import is_ahead_on
from tests.services.drafter.drafter_driver import RunningDrafter, open_command, propose_command, running
from tests.waiting import GIVE_UP_S, eventually

VOCAB = ("vocab_size=257",)


def chain(ids: Sequence[int]) -> Proposal:
    return Proposal(tuple(ids), tuple(range(len(ids))))


def ready(asked: Sequence[int], ahead: Sequence[int]) -> Path:
    path = Path()
    path.grow(chain(asked), is_ahead=False)
    path.grow(chain([*asked, *ahead]), is_ahead=True)
    return path


@pytest.mark.parametrize(
    ("committed", "left", "settled"),
    [
        ([1, 2, 3, 4], (5, 6), Settled(1, 0)),
        ([1, 2, 9], (), Settled(0, 3)),
        ([1, 2, 3, 9], (), Settled(0, 3)),
        ([1, 2, 3, 4, 9], (), Settled(1, 2)),
        ([1, 2, 3, 4, 5, 6, 7, 8], (), Settled(3, 0)),
        ([1], (2, 3, 4, 5, 6), Settled(0, 0)),
    ],
)
def test_a_path_goes_on_behind_what_was_committed(
    committed: list[int], left: tuple[int, ...], settled: Settled
) -> None:
    """Whoever's draft won: committed ids that lie on the path keep the rest of it, others end it."""
    path = ready([1, 2, 3], [4, 5, 6])
    assert path.follow(committed) == settled
    assert path.chain.token_ids == left


def test_every_token_drafted_ahead_is_used_or_dropped_once() -> None:
    """Over any course of asks, commits and growth: once the session has ended, drafted ahead = used + dropped."""
    rng = random.Random(4)
    for _ in range(300):
        path, drafted, settled = Path(), 0, [0, 0]

        def settle(found: Settled, into: list[int] = settled) -> None:
            into[0] += found.num_used
            into[1] += found.num_dropped

        for _ in range(30):
            match rng.randrange(3):
                case 0:
                    wanted = rng.randrange(1, 5)
                    settle(path.claim(wanted))
                    if len(path) < wanted:
                        ids = [*path.chain.token_ids, *rng.choices(range(2), k=wanted - len(path))]
                        path.grow(chain(ids), is_ahead=False)
                case 1:
                    drafted += path.grow(chain([*path.chain.token_ids, rng.randrange(2)]), is_ahead=True)
                case 2:
                    settle(path.follow(rng.choices(range(2), k=rng.randrange(1, 4))))
        settle(path.clear())
        assert sum(settled) == drafted


class Stepping(Drafter[Any]):
    """A stepwise kind whose steps wait until each is let go; it writes down who is in them."""

    kind = "stepping"
    family = "stepping"
    context_limit = 1000
    is_stepwise = True

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, bool]]] = []
        self.go = threading.Semaphore(0)

    def open(self, prefix: Sequence[int], params: SamplingParams) -> list[int]:
        return list(prefix)

    def extend(
        self, session: list[int], token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        session += token_ids

    def propose(self, asks: Sequence[Ask[Any]]) -> list[list[Proposal]]:
        self.steps.append([(ask.session[0], ask.is_ahead) for ask in asks])
        assert self.go.acquire(timeout=GIVE_UP_S)
        return [[chain([ask.session[0]] * ask.num_speculative_tokens)] for ask in asks]


def test_an_ask_waits_for_one_step_and_those_ahead_ride_along() -> None:
    """Drafting ahead ends between two tokens when somebody asks; then it goes on in the asked one's steps only."""
    kind = Stepping()

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        kind.go.release(2)
        await peer.ids(open_command(1, [1]), propose_command(1, 1, (), 2))
        await eventually(lambda: len(kind.steps) == 3)  # the first one ahead
        await peer.send(open_command(2, [2]), propose_command(2, 1, (), 2))
        await eventually(lambda: bool(drafter.engine._inbox))
        kind.go.release(3)
        assert (await peer.answer()).session_id == 2
        assert kind.steps[2:5] == [[(1, True)], [(2, False), (1, True)], [(2, False), (1, True)]]
        kind.go.release(20)
        await eventually(lambda: all(len(session.path) == 5 for session in drafter.engine._table))

    with_ahead(kind, body)


def test_an_ask_that_comes_in_the_middle_joins_the_next_step() -> None:
    """Nobody waits for another one's whole proposal."""
    kind = Stepping()

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        await peer.send(open_command(1, [1]), propose_command(1, 1, (), 3))
        await eventually(lambda: len(kind.steps) == 1)
        await peer.send(open_command(2, [2]), propose_command(2, 1, (), 1))
        await eventually(lambda: bool(drafter.engine._inbox))
        kind.go.release(2)
        assert (await peer.answer()).session_id == 2
        kind.go.release(1)
        assert (await peer.answer()).session_id == 1
        assert kind.steps[:2] == [[(1, False)], [(1, False), (2, False)]]
        kind.go.release(20)

    with_ahead(kind, body, draft_ahead="off")


def test_what_was_drafted_ahead_is_not_drafted_again() -> None:
    """After any commit the proposals are the kind's own, and each token of a path costs one step."""
    proposer, alone = ScriptedKind(acceptance=0.7), ScriptedKind(acceptance=0.7)

    async def body(drafter: RunningDrafter) -> None:
        peer, rng, prefix = drafter.peer(), random.Random(2), [3, 1, 4]
        (got,) = await peer.ids(open_command(1, prefix), propose_command(1, 3, (), 3))
        (session,) = list(drafter.engine._table)
        for _ in range(30):
            (expected,) = alone.propose([Ask(alone.open(prefix, session.held.params), 7)])[0]
            assert got == list(expected.token_ids[:3])
            await eventually(lambda: len(session.path) == 7)
            steps, right = proposer.num_steps, rng.randrange(5)
            committed = [*expected.token_ids[:right], 5 if right < 4 else expected.token_ids[4]]
            on_path = tuple(committed) == expected.token_ids[: len(committed)]
            prefix += committed
            (got,) = await peer.ids(propose_command(1, len(prefix), committed, 3))
            await eventually(lambda: len(session.path) == 7)
            assert proposer.num_steps - steps == (len(committed) if on_path else 7)

    with_ahead(proposer, body)


def test_when_drafting_ahead_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by the operator; else on a device and on cores that this process was pinned to."""
    assert is_ahead_on("on", "cpu")
    assert not is_ahead_on("off", "cuda")
    assert is_ahead_on("auto", "cuda")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3}, raising=False)
    assert is_ahead_on("auto", "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert not is_ahead_on("auto", "cpu")


def with_ahead(proposer: Drafter[Any], body: Any, draft_ahead: str = "on") -> None:
    async def main() -> None:
        config = make_config(DrafterConfig, kind="prompt_lookup", option=VOCAB, draft_ahead=draft_ahead)
        async with running(config, proposer) as drafter:
            await body(drafter)

    asyncio.run(main())
