"""Path equality: whatever drafters, votes, lengths, shapes and peers do, the text is the target's own."""

from __future__ import annotations

import asyncio

from rounds_rig import request, rig

from moot.testing import ScriptedDrafter, ScriptedText


def test_drafted_text_is_plain_text() -> None:
    """With three drafters of unlike quality the ids equal plain decoding, and drafting did happen."""

    async def main() -> None:
        text = ScriptedText(end_period=97)
        drafters = {
            "good": [ScriptedDrafter(text, seed=1, spoil=0.2)],
            "fair": [ScriptedDrafter(text, seed=2, spoil=0.7)],
            "bad": [ScriptedDrafter(text, seed=3, spoil=1.0)],
        }
        async with rig(text=text, drafters=drafters) as router:
            for number in range(10):
                asked = request(prompt=f"prompt {number}".encode(), max_tokens=50, temperature=1.0, seed=number)
                outcome = await router.generate(asked)
                assert (outcome.token_ids, outcome.finish_reason) == router.plain(asked)
            assert router.counter("accepted_tokens_total") > 20
            await router.nothing_left()

    asyncio.run(main())
