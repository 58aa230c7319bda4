"""Who votes: drafters in the router's own process, weights that outlive requests, hints for those who need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from services.router.peers.local_drafters import SLICE_TOKENS
from tests.services.router.generation.rounds_rig import TEXT, request, rig
from tests.waiting import LeapingLoop


@dataclass(frozen=True, slots=True)
class Refrain(ScriptedText):
    """A text that repeats itself every `period` positions."""

    period: int = 7

    def token_at(self, position: int, tail: Sequence[int], num_output: int, params: SamplingParams) -> int:
        return 65 + position % self.period


@pytest.mark.parametrize("kind", ["prompt_lookup", "suffix", "recycling"])
async def test_kinds_without_a_model_run_inside_the_router(kind: str) -> None:
    """The same port, the same vote, no hop: what repeats is drafted and accepted, and nothing is left."""
    text = Refrain()
    async with rig(text=text) as router:
        router.add_local(kind)
        prompt = [65 + position % text.period for position in range(40)]
        outcome = await router.check(request(prompt=prompt, max_tokens=80))
        assert outcome.metrics.drafters[kind].num_accepted_tokens > 20


async def test_likely_ids_are_asked_for_only_where_a_drafter_lives_from_them() -> None:
    """Recycling makes the verifier report candidates, in this process or in a pod; without it none are sent."""
    pod = ScriptedDrafter(TEXT, kind="recycling")
    async with rig(drafters={"pod": pod}) as router:
        await router.check(request(max_tokens=30))
        rows = pod.num_candidate_rows
        assert rows > 0
        await router.generate(request(max_tokens=30, num_speculative_tokens=0))
        assert pod.num_candidate_rows == rows
        assert router.verifiers[0].counts["opens_with_candidates"] == 1


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


async def test_a_long_prompt_is_told_in_slices() -> None:
    """No call of an in-process drafter holds the event loop for a whole long prompt; it ends up knowing all of it."""
    drafter = Counting()
    async with rig(verifiers=[ScriptedVerifier(TEXT, context_limit=50_000)], step_s=0.001) as router:
        router.add_local("counting", drafter)
        prompt = [position % 256 for position in range(5 * SLICE_TOKENS + 17)]
        outcome = await router.check(request(prompt=prompt, max_tokens=60))
        assert drafter.longest_call <= SLICE_TOKENS
        whole = [*prompt, *outcome.token_ids]
        assert len(drafter.told) > len(prompt)
        assert drafter.told == whole[: len(drafter.told)]


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
async def test_a_faulty_kind_is_ejected_like_a_pod(loop: LeapingLoop, raises: bool) -> None:
    """An exception or a wrong id in a drafter never reaches the text: dropped, counted, ejected, back by itself."""
    drafter = Failing(raises)
    async with rig() as router:
        pool = router.add_local("faulty", drafter)
        await router.check(request(max_tokens=40))
        assert drafter.num_calls == 3
        reason = "failed" if raises else "vocabulary"
        assert router.counter("proposals_dropped_total", drafter="faulty", reason=reason) == 3
        assert not pool.is_available
        loop.leap(600)
        assert pool.is_available
        await router.generate(request(max_tokens=10))
        assert drafter.num_calls > 3


async def test_weights_outlive_requests() -> None:
    """What one request learned of a drafter is where the next one starts, and the gauge shows it."""
    async with rig(drafters={"good": 0.0, "bad": 1.0}, vote="majority") as router:
        for number in range(6):
            await router.generate(request(prompt=[number], max_tokens=60))
        good = router.counter("drafter_weight", drafter="good")
        bad = router.counter("drafter_weight", drafter="bad")
        assert good > 1.2 * bad > 0
        start = router.drafter_set.policy.pool_weights.start(["good", "bad"])
        assert start["good"] > start["bad"]


async def test_a_request_uses_the_drafters_it_names() -> None:
    """`drafters` restricts the drafter set of that request and of no other."""
    async with rig(drafters={"one": 0.5, "two": 0.5}) as router:
        (one,), (two,) = router.drafters["one"], router.drafters["two"]
        for fields, opened in (({"drafters": ("two",)}, (0, 1)), ({"drafters": ()}, (0, 1)), ({}, (1, 2))):
            await router.generate(request(max_tokens=20, **fields))
            assert (one.counts["open"], two.counts["open"]) == opened
