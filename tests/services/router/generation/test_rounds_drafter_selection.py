"""Rounds ask no drafter that brings less than waiting for it costs, and no expensive one where a cheap one is sure; the
text is the same either way, and it is seen."""

from __future__ import annotations

import asyncio

import pytest

from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.drafter_selection import USELESS, WINDOW
from moot.testing import Manner, ScriptedDrafter
from services.router.generation.drafter_set import TRIED_IN
from services.router.peers.links import PeerState
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import TEXT, request, rig
from tests.waiting import GIVE_UP_S

PROMPT = b"the moot debates"


@pytest.mark.parametrize("asks", ["paying", "all"])
async def test_a_drafter_that_brings_nothing_is_left_out(asks: str) -> None:
    """After one window a drafter that is always wrong, and slow, is asked in few rounds; metrics say so and why. A
    request that names it still asks it in every round; `all` leaves nobody out."""
    good, wrong = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=1.0)
    wrong.delay_s = 0.01
    async with rig(drafters={"good": good, "wrong": wrong}, asks=asks) as running:

        async def some(least: int) -> int:
            rounds = 0
            while rounds < least:
                rounds += (await running.check(request(PROMPT, max_tokens=120))).metrics.num_rounds
            return rounds

        rounds = await some(2 * WINDOW)
        left_out = running.counter("drafters_left_out", drafter="wrong", reason=USELESS)
        before, more = wrong.counts["propose"], await some(WINDOW)
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


async def test_one_that_is_left_out_reads_few_prompts() -> None:
    """Only requests in which a drafter that is left out may be tried tell it their prompts: reading takes the cores of
    those who work. It is tried in these all the same, and is asked in all of a request that names it."""
    good, wrong = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=1.0)
    async with rig(drafters={"good": good, "wrong": wrong}, asks="paying") as router:
        while not router.counter("drafters_left_out", drafter="wrong", reason=USELESS):
            await router.generate(request(PROMPT, max_tokens=120))
        opened = {one: one.counts["open"] for one in (good, wrong)}
        asked = wrong.counts["propose"]
        number = 0
        async with asyncio.timeout(GIVE_UP_S):
            while wrong.counts["propose"] == asked or number < 4 * TRIED_IN:
                await router.generate(request(PROMPT, max_tokens=120))
                number += 1
        assert good.counts["open"] - opened[good] == number
        assert wrong.counts["open"] - opened[wrong] == number // TRIED_IN
        await router.generate(request(PROMPT, max_tokens=20, drafters=("good", "wrong")))
        assert wrong.counts["open"] - opened[wrong] == number // TRIED_IN + 1


async def test_what_an_ejected_drafter_cost_is_forgotten() -> None:
    """Rounds wait for a silent drafter until it is ejected. From then on nobody waits for it, and what drafting took
    with it does not keep them from drafting without it."""
    silent = ScriptedDrafter(TEXT, manner=lambda: Manner.SILENT)
    tries = CollectionPolicy(soft_deadline_ms=400, hard_deadline_ms=400)
    failures = EjectionPolicy(eject_s=600, warm_up_s=0.0)
    drafters = {"good": 0.0, "silent": silent}
    async with rig(drafters=drafters, tries=tries, failures=failures, length="goodput") as router:
        (link,) = router.pools["silent"].links.values()
        cost = router.drafter_set.policy.draft_cost
        dearest = 0.0
        while link.state is not PeerState.EJECTED:
            # K is fixed, so that it is asked: what drafting costs is learned all the same.
            await router.generate(request(PROMPT, max_tokens=4, num_speculative_tokens=2))
            dearest = max(dearest, cost.seconds(6))
        assert dearest > 0.1
        assert cost.seconds(6) < dearest / 2
        outcome = await router.generate(request(PROMPT, max_tokens=60))
        # How long drafts are is decided by what this machine's rounds take; that there are any is the rule.
        assert outcome.metrics.num_accepted_tokens > 10


@pytest.mark.parametrize("cascade", [1.0, 0.5])
async def test_expensive_drafters_are_skipped_where_a_cheap_one_is_sure(cascade: float) -> None:
    """Once right predictions have shown what they are worth, a slow drafter hears of them no more; where there is no
    prediction it is asked as ever, and knows all that was committed meanwhile."""
    drafter = ScriptedDrafter(TEXT, spoil=0.0)
    drafter.delay_s = 0.01
    async with rig(drafters={"slow": drafter}, cascade=cascade, asks="all") as running:
        running.add_local("prediction")
        plain = request(PROMPT, max_tokens=120)
        ids = running.plain(plain)[0]
        for _ in range(12):
            await running.check(request(PROMPT, max_tokens=120, prediction_token_ids=ids))
        skipped, asked = running.counter("drafter_calls_skipped_total"), drafter.counts["propose"]
        # The prediction is used up half-way: its drafter abstains, and the slow one is asked again.
        outcome = await running.check(request(PROMPT, max_tokens=120, prediction_token_ids=ids[:60]))
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
