"""A round whose cheap drafters are sure does not ask the expensive ones; the text is the same either way."""

from __future__ import annotations

import asyncio

import pytest

from moot.drafters.registry import create
from moot.testing import ScriptedDrafter, ScriptedText
from services.router.peers.local_drafters import LocalPool
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import request, rig

TEXT = ScriptedText()
PROMPT = b"the moot debates"


@pytest.mark.parametrize("cascade", [1.0, 0.5])
def test_expensive_drafters_are_skipped_where_a_cheap_one_is_sure(cascade: float) -> None:
    """Once right predictions have shown what they are worth, a slow drafter hears of them no more; where there is no
    prediction it is asked as ever, and knows all that was committed meanwhile."""

    async def main() -> None:
        drafter = ScriptedDrafter(TEXT, spoil=0.0)
        drafter.delay_s = 0.01
        async with rig(text=TEXT, drafters={"slow": [drafter]}, cascade=cascade, asks="all") as running:
            proposer = create("prediction", {"vocab_size": 257})
            running.drafter_set.sources["prediction"] = LocalPool(
                "prediction", proposer, EjectionPolicy(), running.metrics
            )
            plain = request(PROMPT, max_tokens=120)
            ids = running.plain(plain)[0]
            for _ in range(12):
                outcome = await running.generate(request(PROMPT, max_tokens=120, prediction_token_ids=ids))
                assert outcome.token_ids == ids
            skipped, asked = running.counter("drafter_calls_skipped_total"), drafter.counts["propose"]
            # The prediction is used up half-way: its drafter abstains, and the slow one is asked again.
            outcome = await running.generate(request(PROMPT, max_tokens=120, prediction_token_ids=ids[:60]))
            assert outcome.token_ids == ids
            now_skipped = running.counter("drafter_calls_skipped_total")
            now_asked = drafter.counts["propose"] - asked
            if cascade == 1.0:
                assert skipped == now_skipped == 0
                assert now_asked == outcome.metrics.num_rounds
            else:
                assert skipped > 20
                assert now_skipped - skipped + now_asked == outcome.metrics.num_rounds
                assert now_skipped - skipped >= 5
                assert outcome.metrics.drafters["slow"].num_accepted_tokens >= 40
                assert (await running.generate(plain)).metrics.drafters["slow"].num_accepted_tokens > 80
            await running.nothing_left()

    asyncio.run(main())
