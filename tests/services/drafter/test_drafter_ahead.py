"""Draft-ahead: what is kept of a path, whose turn it is, that it costs nobody anything, and what is told unasked."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from moot.drafters.interface import Drafter
from moot.testing.scripted_kind import ScriptedKind
from services.drafter.drafter_sessions import Path, Settled
from services.drafter.drafting import is_ahead_on
from tests.services.drafter.drafter_driver import (
    Peer,
    RunningDrafter,
    Watched,
    chain,
    finish_command,
    open_command,
    own,
    propose_command,
    running,
    settings,
)
from tests.waiting import eventually


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


class Stepping(Watched):
    """The same, token by token."""

    is_stepwise = True


def ahead(kind: Drafter[Any], draft_ahead: str = "on") -> AbstractAsyncContextManager[tuple[RunningDrafter, Peer]]:
    return running(settings(draft_ahead=draft_ahead), kind)


async def test_an_ask_waits_for_one_step_and_those_ahead_ride_along() -> None:
    """Drafting ahead ends between two tokens when somebody asks; then it goes on in the asked one's steps only."""
    kind = Stepping()
    async with ahead(kind) as (drafter, peer):
        kind.go.release(2)
        await peer.ids(open_command(1, [1]), propose_command(1, 1, (), 2))
        await eventually(lambda: len(kind.calls) == 3)  # the first one ahead
        await peer.send(open_command(2, [2]), propose_command(2, 1, (), 2))
        await eventually(lambda: drafter.engine._inbox)
        kind.go.release(3)
        assert (await peer.answer()).session_id == 2
        assert kind.calls[2:5] == [[(1, True)], [(2, False), (1, True)], [(2, False), (1, True)]]
        kind.go.release(20)
        await eventually(lambda: all(len(session.path) == 5 for session in drafter.engine._table))


async def test_an_ask_that_comes_in_the_middle_joins_the_next_step() -> None:
    """Nobody waits for another one's whole proposal."""
    kind = Stepping()
    async with ahead(kind, draft_ahead="off") as (drafter, peer):
        await peer.send(open_command(1, [1]), propose_command(1, 1, (), 3))
        await eventually(lambda: len(kind.calls) == 1)
        await peer.send(open_command(2, [2]), propose_command(2, 1, (), 1))
        await eventually(lambda: drafter.engine._inbox)
        kind.go.release(2)
        assert (await peer.answer()).session_id == 2
        kind.go.release(1)
        assert (await peer.answer()).session_id == 1
        assert kind.calls[:2] == [[(1, False)], [(1, False), (2, False)]]
        kind.go.release(20)


async def test_what_was_drafted_ahead_is_not_drafted_again() -> None:
    """While idle the drafter goes on by the target's token and a whole proposal, and no further. After any commit the
    proposals are the kind's own, each token of a path costs one step, and a proposal that is ready is answered without
    any. Every token drafted ahead ends as used or as dropped."""
    kind, alone = ScriptedKind(acceptance=0.7), ScriptedKind(acceptance=0.7)
    async with ahead(kind) as (drafter, peer):
        rng, prefix, num_ready = random.Random(2), [3, 1, 4], 0
        (got,) = await peer.ids(open_command(1, prefix), propose_command(1, 3, (), 3))
        session = drafter.session()
        for _ in range(30):
            expected = own(alone, prefix, 7)
            assert got == expected[:3]
            await eventually(lambda: not session.path.wants_more)
            assert list(session.path.chain.token_ids) == expected
            steps, right = kind.num_steps, rng.randrange(5)
            committed = [*expected[:right], 5 if right < 4 else expected[4]]
            on_path = committed == expected[: len(committed)]
            num_ready += on_path and len(committed) <= 4
            prefix += committed
            (got,) = await peer.ids(propose_command(1, len(prefix), committed, 3))
            assert drafter.metric("moot_draft_ahead_answers_total") == num_ready
            await eventually(lambda: len(session.path) == 7)
            assert kind.num_steps - steps == (len(committed) if on_path else 7)
        assert drafter.metric("moot_draft_seconds_count") == 31 - num_ready
        await peer.send(finish_command(1))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        used, dropped = (drafter.metric(f"moot_draft_ahead_{fate}_tokens_total") for fate in ("used", "dropped"))
        assert drafter.metric("moot_draft_ahead_tokens_total") == used + dropped


async def test_without_draft_ahead_an_idle_drafter_drafts_nothing() -> None:
    """Where verifier and drafter share cores, idle work would slow the verifier down."""
    kind = ScriptedKind()
    async with ahead(kind, draft_ahead="off") as (drafter, peer):
        for n in (1, 2):
            await peer.ids(open_command(n, [n]), propose_command(n, 1, (), 3))
        assert kind.num_steps == 6
        assert drafter.metric("moot_draft_ahead_tokens_total") == 0


@pytest.mark.parametrize("takes_ahead", [True, False])
async def test_a_router_that_takes_it_is_told_where_the_text_goes_along_the_path(takes_ahead: bool) -> None:
    """Over any course of rounds, taken from what was told or asked for: a path is told unasked once a commit has
    confirmed it, never before and never to a router of an earlier version, which would take it for a broken answer.
    Every proposal is the kind's own, and what was taken is answered no second time."""
    kind, alone, k = ScriptedKind(acceptance=0.8), ScriptedKind(acceptance=0.8), 3
    async with ahead(kind) as (drafter, peer):
        rng, prefix, num_taken, is_told = random.Random(5), [3, 1, 4], 0, False
        await peer.ids(open_command(1, prefix), propose_command(1, 3, (), k, takes_ahead=takes_ahead))
        session = drafter.session()
        for index in range(1, 40):
            await eventually(lambda: len(session.path) == 2 * k + 1)
            path = own(alone, prefix, 2 * k + 1)
            if is_told:
                told = (await peer.answer()).ahead
                assert (told.round_index, told.base_length) == (index - 1, len(prefix))
                assert list(told.path.token_ids) == path
            follows = rng.random() < 0.6
            right = k if follows else rng.choice([0, 2])
            committed = path[: k + 1] if follows else [*path[:right], (path[right] + 1) % 257]
            take = is_told and follows
            prefix += committed
            fields = {"round_index": index, "takes_ahead": takes_ahead, "is_answered": take}
            ask = propose_command(1, len(prefix), committed, k, **fields)
            if take:
                num_taken += 1
                await peer.send(ask)
            else:
                # Had it told anything, that would come before this answer.
                answer = await peer.ask(ask)
                assert answer.proposed.round_index == index
                assert list(answer.proposed.proposals[0].token_ids) == own(alone, prefix, k)
            await eventually(lambda: session.length == len(prefix))  # noqa: B023 - awaited here
            is_told = takes_ahead and follows
        assert num_taken > 5 or not takes_ahead
        assert drafter.metric("moot_draft_ahead_answers_total") >= num_taken


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
