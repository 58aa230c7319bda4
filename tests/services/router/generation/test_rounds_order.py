"""What a round does first: peers that wait for the router's word get it before the router does what can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moot.core.types import FinishReason
from moot.testing import ScriptedDrafter, ScriptedText
from services.router.store import MemoryStore
from tests.services.router.generation.rounds_rig import request, rig

TEXT = ScriptedText()


class NotingStore(MemoryStore):
    """Notes `look()` at every commit that ends below `up_to` output tokens."""

    def __init__(self, up_to: int) -> None:
        super().__init__()
        self._up_to = up_to
        self.look: Callable[[], float] = lambda: 0
        self.seen: list[float] = []

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        if expected_length + len(token_ids) < self._up_to:
            self.seen.append(self.look())
        return await super().commit(request_id, epoch, expected_length, token_ids, finish_reason)


def test_the_next_questions_are_written_before_a_round_is_committed_and_shown() -> None:
    """Every drafter has its next question on the wire when the span before it goes to the store."""

    async def main() -> None:
        store = NotingStore(up_to=70)  # the last rounds may have nothing left to ask for
        drafters = {name: [ScriptedDrafter(TEXT, spoil=0.5, seed=seed)] for seed, name in enumerate(("one", "two"))}
        async with rig(text=TEXT, drafters=drafters, store=store) as router:
            store.look = lambda: router.counter("round_turn_seconds_count", stage="propose")
            asked = request(max_tokens=80)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert len(store.seen) > 10
            for index, num_written in enumerate(store.seen, start=1):
                assert num_written >= 2 * index

    asyncio.run(main())


def test_every_round_is_counted_though_the_next_one_is_asked_first() -> None:
    """The last round of a request as well: the counters' sums are the requests' own."""

    async def main() -> None:
        async with rig(text=TEXT, drafters={"one": [ScriptedDrafter(TEXT, spoil=0.3)]}) as router:
            outcomes = await asyncio.gather(*(router.generate(request(max_tokens=30)) for _ in range(4)))
            assert router.counter("rounds_total") == sum(outcome.metrics.num_rounds for outcome in outcomes)
            drafted = sum(outcome.metrics.num_draft_tokens for outcome in outcomes)
            assert router.counter("draft_tokens_total") == drafted

    asyncio.run(main())
