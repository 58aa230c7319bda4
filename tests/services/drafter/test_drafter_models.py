"""A draft model as a service, plain or staged: driven token by token it proposes what it would alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.services.drafter.drafter_driver import draft_model, neural, open_command, own, propose_command, running
from tests.waiting import eventually

STAGED = ("stages=prompt_lookup~max_ngram=3+recycling", "stage_tokens=5")


@pytest.mark.parametrize(("option", "draft_ahead"), [((), "auto"), (STAGED, "on"), (STAGED, "off")])
async def test_a_service_drafts_for_many_streams_as_the_model_alone(
    tmp_path: Path, option: tuple[str, ...], draft_ahead: str
) -> None:
    """Batched in one service, each session with a K of its own, its proposals are those of the model alone, round after
    round, with and without drafting ahead (C04)."""
    folder = make_tiny_model(tmp_path / "model", context=256)
    alone = draft_model(folder)
    async with running(neural(folder, *option, draft_ahead=draft_ahead)) as (drafter, _):

        async def talk(n: int) -> None:
            peer, prefix = drafter.peer(), [n, 5, 9, n, 5, 9, n]
            got = await peer.ids(open_command(n, prefix), propose_command(n, len(prefix), (), n))
            for round_index in range(1, 7):
                expected = own(alone, prefix, n)
                assert got == [expected]
                # All of it and its next token, or a head and something else.
                committed = [*expected[: n if round_index % 2 else n // 2], (n + round_index) % 250]
                prefix += committed
                got = await peer.ids(propose_command(n, len(prefix), committed, n, round_index=round_index))
            peer.call.cancel()

        async with asyncio.TaskGroup() as group:
            for n in range(2, 6):
                group.create_task(talk(n))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        kind: Any = drafter.drafter
        assert kind.kv_used_tokens == 0
        assert not option or kind.stage_counts[0] > 0
