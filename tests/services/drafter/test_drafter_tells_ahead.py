"""What a drafter tells unasked: only to routers that take it, only where the text follows, in step with its asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from moot.core.options import make_config
from moot.drafters.interface import Ask
from moot.testing.scripted_kind import ScriptedKind
from services.drafter.config import DrafterConfig
from tests.services.drafter.drafter_driver import GREEDY, RunningDrafter, open_command, propose_command, running
from tests.waiting import eventually

PREFIX = [3, 1, 4]
K = 3


def with_ahead(body: Callable[[RunningDrafter], Awaitable[None]]) -> None:
    async def main() -> None:
        config = make_config(DrafterConfig, kind="prompt_lookup", option=("vocab_size=257",), draft_ahead="on")
        async with running(config, ScriptedKind(acceptance=0.8)) as drafter:
            await body(drafter)

    asyncio.run(main())


def own(prefix: list[int], count: int) -> list[int]:
    """What the kind says after `prefix`."""
    alone = ScriptedKind(acceptance=0.8)
    ((chain,),) = alone.propose([Ask(alone.open(prefix, GREEDY), count)])
    return list(chain.token_ids)


def test_it_tells_where_the_text_has_gone_along_its_path() -> None:
    """Not after the first answer, which nothing has confirmed; not after a commit that left the path."""

    async def body(drafter: RunningDrafter) -> None:
        peer, prefix = drafter.peer(), list(PREFIX)
        await peer.ids(open_command(1, prefix), propose_command(1, 3, (), K, takes_ahead=True))
        (session,) = list(drafter.engine._table)
        await eventually(lambda: len(session.path) == 2 * K + 1)
        path = own(prefix, 2 * K + 1)
        committed = path[: K + 1]
        prefix += committed
        # Had it told anything, that would come before this answer.
        answer = await peer.ask(propose_command(1, len(prefix), committed, K, round_index=1, takes_ahead=True))
        assert answer.WhichOneof("answer") == "proposed"
        ahead = (await peer.answer()).ahead
        assert (ahead.round_index, ahead.base_length) == (1, len(prefix))
        assert list(ahead.path.token_ids) == own(prefix, 2 * K + 1)
        committed = [(path[K + 1] + 1) % 257]
        prefix += committed
        answer = await peer.ask(propose_command(1, len(prefix), committed, K, round_index=2, takes_ahead=True))
        assert answer.WhichOneof("answer") == "proposed"
        await eventually(lambda: len(session.path) == 2 * K + 1)
        committed = own(prefix, 1)
        prefix += committed
        answer = await peer.ask(propose_command(1, len(prefix), committed, K, round_index=3, takes_ahead=True))
        assert answer.proposed.round_index == 3

    with_ahead(body)


def test_it_tells_nothing_to_a_router_that_does_not_take_it() -> None:
    """A router of an earlier version would take it for a broken answer."""

    async def body(drafter: RunningDrafter) -> None:
        peer, prefix = drafter.peer(), list(PREFIX)
        await peer.ids(open_command(1, prefix), propose_command(1, 3, (), K))
        (session,) = list(drafter.engine._table)
        for index in range(1, 5):
            await eventually(lambda: len(session.path) == 2 * K + 1)
            committed = own(prefix, K + 1)
            prefix += committed
            answer = await peer.ask(propose_command(1, len(prefix), committed, K, round_index=index))
            assert answer.proposed.round_index == index

    with_ahead(body)


def test_told_and_asked_it_says_the_same() -> None:
    """Over any course of rounds, taken from what was told or asked for: every proposal is the kind's own, and what was
    taken is answered no second time."""

    async def body(drafter: RunningDrafter) -> None:
        peer, rng, prefix = drafter.peer(), random.Random(5), list(PREFIX)
        await peer.ids(open_command(1, prefix), propose_command(1, 3, (), K, takes_ahead=True))
        (session,) = list(drafter.engine._table)
        num_taken, is_told = 0, False
        for index in range(1, 40):
            await eventually(lambda: len(session.path) == 2 * K + 1)
            path = own(prefix, 2 * K + 1)
            if is_told:
                assert list((await peer.answer()).ahead.path.token_ids) == path
            right = rng.choice([0, 2, K, K, K, K])
            committed = path[: right + 1] if right == K else [*path[:right], (path[right] + 1) % 257]
            take = is_told and right == K
            prefix += committed
            ask = propose_command(1, len(prefix), committed, K, round_index=index, takes_ahead=True, is_answered=take)
            if take:
                num_taken += 1
                await peer.send(ask)
            else:
                answer = await peer.ask(ask)
                assert answer.proposed.round_index == index
                assert list(answer.proposed.proposals[0].token_ids) == own(prefix, K)
            await eventually(lambda: session.length == len(prefix))  # noqa: B023 - awaited here
            is_told = right == K
        assert num_taken > 5
        assert drafter.metric("moot_draft_ahead_answers_total") >= num_taken

    with_ahead(body)
