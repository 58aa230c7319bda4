"""Who votes: drafters in the router's own process, weights that outlive requests, hints for those who need them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.drafters.registry import create
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from services.router.peers.local_drafters import SLICE_TOKENS, LocalPool
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import Rig, request, rig
from tests.waiting import LeapingLoop, run_leaping


@dataclass(frozen=True, slots=True)
class Refrain(ScriptedText):
    """A text that repeats itself every `period` positions."""

    period: int = 7

    def token_at(self, position: int, tail: Sequence[int], num_output: int, params: SamplingParams) -> int:
        return 65 + position % self.period


def add_local(router: Rig, drafter_id: str, drafter: Drafter[Any]) -> LocalPool:
    pool = LocalPool(drafter_id, drafter, EjectionPolicy(eject_s=600), router.metrics)
    router.drafter_set.policy.admit(drafter_id, drafter.family)
    router.drafter_set.sources[drafter_id] = pool
    return pool


@pytest.mark.parametrize("kind", ["prompt_lookup", "suffix", "recycling"])
def test_kinds_without_a_model_run_inside_the_router(kind: str) -> None:
    """The same port, the same vote, no hop: what repeats is drafted and accepted, and nothing is left."""

    async def main() -> None:
        text = Refrain()
        async with rig(text=text) as router:
            pool = add_local(router, kind, create(kind, {"vocab_size": text.vocab_size}))
            prompt = [65 + position % text.period for position in range(40)]
            asked = request(prompt=prompt, max_tokens=80)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert outcome.metrics.drafters[kind].num_accepted_tokens > 20
            assert pool.num_sessions == 0
            await router.nothing_left()

    asyncio.run(main())


def test_likely_ids_are_asked_for_only_where_a_drafter_lives_from_them() -> None:
    """Recycling makes the verifier report candidates, in this process or in a pod; without it none are sent."""

    async def main() -> None:
        text = ScriptedText()
        verifier = ScriptedVerifier(text)
        pod = ScriptedDrafter(text, kind="recycling")
        async with rig(text=text, verifiers=[verifier], drafters={"pod": [pod]}) as router:
            with_hints = request(max_tokens=30)
            assert (await router.generate(with_hints)).token_ids == router.plain(with_hints)[0]
            assert pod.num_candidate_rows > 0
            rows = pod.num_candidate_rows
            await router.generate(request(max_tokens=30, num_speculative_tokens=0))
            assert pod.num_candidate_rows == rows
            assert verifier.counts["opens_with_candidates"] == 1

    asyncio.run(main())


class Counting(Drafter[list[int]]):
    """Proposes what it was told last, and remembers how it was told."""

    kind: ClassVar[str] = "counting"
    family = "counting"
    context_limit = 100_000

    def __init__(self) -> None:
        self.longest_call = 0
        self.told: list[int] = []

    def open(self, prefix: Sequence[int], params: SamplingParams) -> list[int]:
        self.longest_call = max(self.longest_call, len(prefix))
        self.told = list(prefix)
        return self.told

    def extend(
        self, session: list[int], token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        self.longest_call = max(self.longest_call, len(token_ids))
        session.extend(token_ids)

    def propose(self, asks: Sequence[Ask[list[int]]]) -> list[list[Proposal]]:
        return [[Proposal(tuple(ask.session[-ask.num_speculative_tokens :]), ())] for ask in asks]


def test_a_long_prompt_is_told_in_slices() -> None:
    """No call of an in-process drafter holds the event loop for a whole long prompt; it ends up knowing all of it."""

    async def main() -> None:
        text = ScriptedText()
        verifier = ScriptedVerifier(text, context_limit=50_000)
        verifier.step_s = 0.001
        async with rig(text=text, verifiers=[verifier]) as router:
            drafter = Counting()
            add_local(router, "counting", drafter)
            prompt = [position % 256 for position in range(5 * SLICE_TOKENS + 17)]
            asked = request(prompt=prompt, max_tokens=60)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert drafter.longest_call <= SLICE_TOKENS
            whole = [*prompt, *outcome.token_ids]
            assert len(drafter.told) > len(prompt)
            assert drafter.told == whole[: len(drafter.told)]

    asyncio.run(main())


class Failing(Counting):
    """Raises, or returns an id outside the vocabulary."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises
        self.num_calls = 0

    def propose(self, asks: Sequence[Ask[list[int]]]) -> list[list[Proposal]]:
        self.num_calls += 1
        if self.raises:
            raise RuntimeError("a bug of this kind")
        return [[Proposal((10**6,), (1,))] for _ in asks]


@pytest.mark.parametrize("raises", [True, False])
def test_a_faulty_kind_is_ejected_like_a_pod(raises: bool) -> None:
    """An exception or a wrong id in a drafter never reaches the text: dropped, counted, ejected, back by itself."""

    async def main(loop: LeapingLoop) -> None:
        text = ScriptedText()
        async with rig(text=text) as router:
            drafter = Failing(raises)
            pool = add_local(router, "faulty", drafter)
            asked = request(max_tokens=40)
            assert (await router.generate(asked)).token_ids == router.plain(asked)[0]
            assert drafter.num_calls == 3
            reason = "failed" if raises else "vocabulary"
            assert router.counter("proposals_dropped_total", drafter="faulty", reason=reason) == 3
            assert not pool.is_available
            loop.leap(600)
            assert pool.is_available
            await router.generate(request(max_tokens=10))
            assert drafter.num_calls > 3
            assert pool.num_sessions == 0

    run_leaping(main)


def test_weights_outlive_requests() -> None:
    """What one request learned of a drafter is where the next one starts, and the gauge shows it."""

    async def main() -> None:
        text = ScriptedText()
        drafters = {"good": [ScriptedDrafter(text, spoil=0.0)], "bad": [ScriptedDrafter(text, spoil=1.0)]}
        async with rig(text=text, drafters=drafters, vote="majority") as router:
            for number in range(6):
                await router.generate(request(prompt=[number], max_tokens=60))
            good = router.counter("drafter_weight", drafter="good")
            bad = router.counter("drafter_weight", drafter="bad")
            assert good > 1.2 * bad > 0
            start = router.drafter_set.policy.pool_weights.start(["good", "bad"])
            assert start["good"] > start["bad"]

    asyncio.run(main())


def test_a_request_uses_the_drafters_it_names() -> None:
    """`drafters` restricts the drafter set of that request and of no other."""

    async def main() -> None:
        text = ScriptedText()
        drafters = {"one": [ScriptedDrafter(text)], "two": [ScriptedDrafter(text)]}
        async with rig(text=text, drafters=drafters) as router:
            await router.generate(request(max_tokens=20, drafters=("two",)))
            assert drafters["one"][0].counts["open"] == 0
            assert drafters["two"][0].counts["open"] == 1
            await router.generate(request(max_tokens=20, drafters=()))
            assert drafters["two"][0].counts["open"] == 1
            await router.generate(request(max_tokens=20))
            assert drafters["one"][0].counts["open"] == 1

    asyncio.run(main())
