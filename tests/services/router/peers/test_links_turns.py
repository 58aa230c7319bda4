"""Equals among replicas take turns, so that a quiet system does not keep one of them busy and the others idle."""

from __future__ import annotations

import asyncio

from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from tests.services.router.generation.rounds_rig import request, rig


def test_requests_one_at_a_time_go_round() -> None:
    """Three verifiers, three replicas of a drafter, nine requests one after the other: three for each."""

    async def main() -> None:
        text = ScriptedText()
        verifiers = [ScriptedVerifier(text) for _ in range(3)]
        replicas = [ScriptedDrafter(text) for _ in range(3)]
        async with rig(text=text, verifiers=verifiers, drafters={"one": replicas}) as router:
            for number in range(9):
                await router.generate(request(prompt=[number], max_tokens=12))
            assert [verifier.counts["open"] for verifier in verifiers] == [3] * 3
            assert [replica.counts["open"] for replica in replicas] == [3] * 3
            await router.nothing_left()

    asyncio.run(main())
