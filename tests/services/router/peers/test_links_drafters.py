"""Drafters that are late, dead, lying, forgetful or of another tokenizer: dropped, counted, ejected, and back again."""

from __future__ import annotations

import asyncio

import pytest

from moot.core.speculation.collection import CollectionPolicy
from moot.testing import Manner, ScriptedDrafter, ScriptedVerifier
from services.router.peers.links import PeerState
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import QUICK_BALLOT, TEXT, Rig, request, rig
from tests.waiting import LeapingLoop, eventually


def dropped(router: Rig, drafter: str, reason: str) -> float:
    return router.counter("proposals_dropped_total", drafter=drafter, reason=reason)


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        (Manner.EMPTY, "empty"),
        (Manner.TOO_LONG, "too_long"),
        (Manner.OUT_OF_RANGE, "vocabulary"),
        (Manner.BAD_CONFIDENCES, "confidences"),
    ],
)
async def test_c20_malformed_proposals_are_dropped_counted_and_ejected_after_three(
    loop: LeapingLoop, manner: Manner, reason: str
) -> None:
    """A lying drafter changes no token, is asked no more after three failures, and comes back by itself."""
    liar = ScriptedDrafter(TEXT, manner=lambda: manner)
    async with rig(drafters={"liar": liar}, failures=EjectionPolicy(eject_s=600)) as router:
        await router.check(request(max_tokens=30))
        assert dropped(router, "liar", reason) == 3
        (link,) = router.pools["liar"].links.values()
        assert link.state is PeerState.EJECTED
        assert liar.counts["propose"] == 3
        assert router.counter("accepted_tokens_total") == 0
        liar.manner = lambda: Manner.TRUE
        liar.spoil = 0.0
        loop.leap(600)
        await eventually(lambda: link.is_ready)
        await router.check(request(max_tokens=30))
        assert router.counter("accepted_tokens_total") > 0


async def test_a_frozen_drafter_stalls_three_rounds_at_most() -> None:
    """A drafter that stops answering costs the deadline until its third failure, and nothing after that."""
    frozen = ScriptedDrafter(TEXT, manner=lambda: Manner.SILENT)
    tries = CollectionPolicy(soft_deadline_ms=20, hard_deadline_ms=60, quorum=1.0)
    failures = EjectionPolicy(eject_s=600, warm_up_s=0.03)
    drafters = {"frozen": frozen, "good": 0.0}
    async with rig(drafters=drafters, tries=tries, failures=failures, num_speculative_tokens=3) as router:
        outcome = await router.check(request(max_tokens=60))
        (link,) = router.pools["frozen"].links.values()
        assert link.state is PeerState.EJECTED
        assert 3 <= frozen.counts["propose"] <= 5
        assert outcome.metrics.num_rounds > 10


async def test_a_long_first_answer_is_no_failure() -> None:
    """Reading a long prompt may take longer than a round: a drafter that answers others meanwhile is not struck."""
    slow = ScriptedDrafter(TEXT, manner=lambda: Manner.SILENT)
    failures = EjectionPolicy(eject_s=600, warm_up_s=600)
    async with rig(drafters={"slow": slow}, tries=QUICK_BALLOT, failures=failures) as router:
        for _ in range(3):
            await router.generate(request(max_tokens=3))
        (link,) = router.pools["slow"].links.values()
        assert link.is_ready


async def test_c06_late_doubled_and_stale_answers_are_dropped_and_counted() -> None:
    """An answer that fits no open question is counted and touches nothing."""
    manners = iter([Manner.LATE, Manner.TRUE, Manner.DOUBLE, Manner.STALE] * 50)
    odd = ScriptedDrafter(TEXT, spoil=0.0, manner=lambda: next(manners))
    odd.late_s = 0.15
    async with rig(drafters={"odd": odd}, tries=QUICK_BALLOT, num_speculative_tokens=3) as router:
        await router.check(request(max_tokens=80))
        assert dropped(router, "odd", "duplicate") >= 1
        assert dropped(router, "odd", "stale") >= 2
        assert router.counter("accepted_tokens_total") > 0


async def test_c06_an_answer_after_the_deadline_is_late_and_no_part_of_its_round(loop: LeapingLoop) -> None:
    """It comes while its round is being verified without it: counted, not used, and the next one is."""
    verifier = ScriptedVerifier(TEXT)
    manners = iter([Manner.LATE])

    def manner() -> Manner:
        found = next(manners, Manner.TRUE)
        if found is Manner.LATE:
            verifier.freeze()
        return found

    drafter = ScriptedDrafter(TEXT, spoil=0.0, manner=manner)
    drafter.late_s = 40.0
    tries = CollectionPolicy(soft_deadline_ms=20_000, hard_deadline_ms=20_000)
    async with rig(verifiers=[verifier], drafters={"slow": drafter}, tries=tries, num_speculative_tokens=3) as router:
        task = asyncio.create_task(router.check(request(max_tokens=6)))
        await eventually(lambda: drafter.counts["propose"] == 1)
        loop.leap(20)
        await eventually(lambda: verifier.counts["verify"] == 1)
        loop.leap(20)
        await eventually(lambda: dropped(router, "slow", "late") == 1)
        verifier.thaw()
        metrics = (await task).metrics
        # Opening, a round of one token without a draft, and one of four.
        assert (metrics.num_rounds, metrics.num_accepted_tokens) == (2, 3)


async def test_c08_another_tokenizer_is_refused_with_both_fingerprints() -> None:
    """A drafter that speaks other ids is never used, and the message names both tokenizers."""
    foreign = ScriptedDrafter(TEXT, tokenizer_fingerprint="permuted")
    async with rig(drafters={"foreign": foreign}, wait_for_drafters=False) as router:
        (link,) = router.pools["foreign"].links.values()
        await eventually(lambda: link.state is PeerState.REFUSED)
        assert "permuted" in (link.refusal or "")
        assert "scripted" in (link.refusal or "")
        await router.check(request(max_tokens=10))
        assert foreign.counts["open"] == 0


async def test_a_forgotten_session_is_opened_again_in_the_same_round() -> None:
    """`unknown session` costs one more exchange, no proposal and no token."""
    manners = iter([Manner.TRUE, Manner.UNKNOWN] * 50)
    forgetful = ScriptedDrafter(TEXT, spoil=0.0, manner=lambda: next(manners))
    async with rig(drafters={"forgetful": forgetful}, num_speculative_tokens=3) as router:
        metrics = (await router.check(request(max_tokens=41))).metrics
        assert metrics.num_rounds == 10
        assert metrics.drafters["forgetful"].num_accepted_tokens == 30
        assert forgetful.counts["open"] > 5


async def test_c21_a_drafter_past_its_context_is_left_out() -> None:
    """Drafter context 2048, prompt 2040: its proposals are used up to its limit, then the others go on alone."""
    short = ScriptedDrafter(TEXT, spoil=0.0, context_limit=2048)
    long = ScriptedDrafter(TEXT, spoil=1.0)
    async with rig(drafters={"short": short, "long": long}) as router:
        outcome = await router.check(request(prompt=[index % 251 for index in range(2040)], max_tokens=50))
        assert outcome.metrics.drafters["short"].num_accepted_tokens > 0
        assert short.longest_prefix_asked < 2048
        assert long.longest_prefix_asked > 2048
        assert dropped(router, "short", "too_long") == 0


async def test_replicas_share_the_requests_and_stand_in_for_each_other() -> None:
    """A request uses the least loaded replica, keeps it, and goes on with another one when it dies."""
    first, second = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=0.0)
    async with rig(step_s=0.005, drafters={"pool": [first, second]}) as router:
        running = router.begin(request(max_tokens=120) for _ in range(4))
        await eventually(lambda: first.num_sessions == second.num_sessions == 2)
        await first.kill()
        await running
        assert second.counts["open"] >= 4
        await first.start()
        await eventually(lambda: all(link.is_ready for link in router.pools["pool"].links.values()))


async def test_all_drafters_dead_is_plain_decoding() -> None:
    """With every drafter gone in mid-stream the text goes on, one token a round, without waiting for deadlines."""
    async with rig(step_s=0.002, drafters={"only": 0.0}, num_speculative_tokens=2) as router:
        (drafter,) = router.drafters["only"]
        task = asyncio.create_task(router.check(request(max_tokens=100)))
        await eventually(lambda: router.counter("accepted_tokens_total") > 4)
        await drafter.kill()
        metrics = (await task).metrics
        assert metrics.num_rounds > metrics.num_accepted_tokens
        await drafter.start()
        await eventually(lambda: router.pools["only"].is_available)
        assert (await router.generate(request(max_tokens=20))).metrics.num_accepted_tokens > 0


async def test_a_draining_drafter_is_left_in_good_order() -> None:
    """A drafter that says it goes away is asked nothing new, and left once nothing of the router runs there."""
    leaving, staying = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=0.0)
    async with rig(drafters={"pool": [leaving, staying]}) as router:
        await eventually(lambda: leaving.counts["streams"] == 1)
        leaving.drain()
        link = router.pools["pool"].links[leaving.address]
        await eventually(lambda: link.state is PeerState.LOST)
        await eventually(lambda: leaving.num_streams == 0)
        before = leaving.counts["open"]
        for _ in range(3):
            await router.generate(request(max_tokens=10))
        assert leaving.counts["open"] == before
        assert staying.counts["open"] == 3


async def test_requests_one_at_a_time_go_round() -> None:
    """Equals take turns, so that a quiet system does not keep one of them busy and the others idle: three verifiers,
    three replicas of a drafter, nine requests one after the other, three for each."""
    replicas = [ScriptedDrafter(TEXT) for _ in range(3)]
    async with rig(verifiers=3, drafters={"one": replicas}) as router:
        for number in range(9):
            await router.generate(request(prompt=[number], max_tokens=12))
        assert [peer.counts["open"] for peer in (*router.verifiers, *replicas)] == [3] * 6
