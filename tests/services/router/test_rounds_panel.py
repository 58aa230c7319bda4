"""Rounds do not ask a drafter that brings less than waiting for it costs; the text is the same, and it is seen."""

from __future__ import annotations

import asyncio

import pytest
from rounds_rig import request, rig

from moot.core.panel import USELESS, WINDOW
from moot.testing import ScriptedDrafter, ScriptedText
from services.router.electorate import BallotPolicy

TEXT = ScriptedText()
PROMPT = b"the moot debates"
PATIENT = BallotPolicy(soft_deadline_s=5.0, hard_deadline_s=5.0)
"""Nobody is late on a loaded machine: who is, is ejected."""


@pytest.mark.parametrize("asks", ["paying", "all"])
def test_a_drafter_that_brings_nothing_is_left_out(asks: str) -> None:
    """After one window a drafter that is always wrong, and slow, is asked in few rounds; metrics say so and why. A
    request that names it still asks it in every round; `all` leaves nobody out."""

    async def main() -> None:
        good, wrong = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=1.0)
        wrong.delay_s = 0.01
        drafters = {"good": [good], "wrong": [wrong]}
        async with rig(text=TEXT, drafters=drafters, ballots=PATIENT, asks=asks) as running:
            plain = request(PROMPT, max_tokens=120)
            ids = running.plain(plain)[0]
            rounds = 0
            while rounds < 2 * WINDOW:
                outcome = await running.generate(request(PROMPT, max_tokens=120))
                assert outcome.token_ids == ids
                rounds += outcome.metrics.num_rounds
            left_out = running.counter("drafters_left_out", drafter="wrong", reason=USELESS)
            before, more = wrong.counts["propose"], 0
            while more < WINDOW:
                outcome = await running.generate(request(PROMPT, max_tokens=120))
                assert outcome.token_ids == ids
                more += outcome.metrics.num_rounds
            asked = wrong.counts["propose"] - before
            assert good.counts["propose"] == rounds + more
            if asks == "all":
                assert left_out == 0
                assert asked == more
            else:
                assert left_out == 1
                assert asked < more / 8
            before = wrong.counts["propose"]
            outcome = await running.generate(request(PROMPT, max_tokens=40, drafters=("wrong", "good")))
            assert wrong.counts["propose"] - before == outcome.metrics.num_rounds
            await running.nothing_left()

    asyncio.run(main())
