"""A staged draft model as a service: driven token by token it proposes what it would alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moot.core.errors import ConfigError
from moot.core.options import make_config
from moot.drafters.interface import Ask
from moot.drafters.registry import REQUEST_KINDS, create
from moot.testing.tiny_model import make_tiny_model
from services.drafter.config import DrafterConfig
from services.drafter.serve import make_drafter_kind
from tests.services.drafter.drafter_driver import GREEDY, RunningDrafter, open_command, propose_command, running
from tests.waiting import eventually

FIXED = ("dtype=float64", "device=cpu", "batch_invariant=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("staged") / "model", context=256)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return create("neural", {"model": folder, "dtype": "float64", "device": "cpu", "batch_invariant": True})


@pytest.mark.parametrize("draft_ahead", ["on", "off"])
def test_a_staged_service_proposes_what_the_draft_model_would(folder: Path, alone: Any, draft_ahead: str) -> None:
    """Several streams at once, round after round, with and without drafting ahead."""
    option = (*FIXED, "stages=prompt_lookup~max_ngram=3+recycling", "stage_tokens=5")
    settings = make_config(
        DrafterConfig, kind="neural", model=str(folder), num_threads=1, option=option, draft_ahead=draft_ahead
    )

    async def body(drafter: RunningDrafter) -> None:
        async def talk(n: int) -> None:
            peer, prefix = drafter.peer(), [n, 5, 9, n, 5, 9, n]
            got = await peer.ids(open_command(n, prefix), propose_command(n, len(prefix), (), 4))
            for round_index in range(1, 9):
                session: Any = alone.open(prefix, GREEDY)
                (chain,) = alone.propose([Ask(session, 4)])[0]
                alone.close(session)
                assert got == [list(chain.token_ids)]
                # All of it and its next token, or a head and something else.
                committed = [*chain.token_ids[: 4 if round_index % 2 else 2], (n + round_index) % 250]
                prefix += committed
                got = await peer.ids(propose_command(n, len(prefix), committed, 4, round_index=round_index))
            peer.call.cancel()

        async with asyncio.TaskGroup() as group:
            for n in range(1, 5):
                group.create_task(talk(n))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        proposer: Any = drafter.drafter
        assert proposer.stage_counts[0] > 0
        assert proposer.kv_used_tokens == 0

    async def main() -> None:
        async with running(settings) as drafter:
            await body(drafter)

    asyncio.run(main())


@pytest.mark.parametrize("kind", REQUEST_KINDS)
def test_a_kind_that_lives_from_requests_is_no_service(kind: str) -> None:
    """It would abstain for ever: what it needs never leaves the router."""
    with pytest.raises(ConfigError, match="the router runs it itself"):
        make_drafter_kind(make_config(DrafterConfig, kind=kind, option=("vocab_size=50",)))
