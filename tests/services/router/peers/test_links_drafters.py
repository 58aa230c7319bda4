"""Drafters that are late, dead, lying, forgetful or of another tokenizer: dropped, counted, ejected, and back again."""

from __future__ import annotations

import asyncio

import pytest

from moot.core.speculation.collection import CollectionPolicy
from moot.testing import Manner, ScriptedDrafter, ScriptedText, ScriptedVerifier
from services.router.peers.links import PeerState
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import QUICK_BALLOT, request, rig
from tests.waiting import LeapingLoop, eventually, run_leaping

TEXT = ScriptedText()


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        (Manner.EMPTY, "empty"),
        (Manner.TOO_LONG, "too_long"),
        (Manner.OUT_OF_RANGE, "vocabulary"),
        (Manner.BAD_CONFIDENCES, "confidences"),
    ],
)
def test_c20_malformed_proposals_are_dropped_counted_and_ejected_after_three(manner: Manner, reason: str) -> None:
    """A lying drafter changes no token, is asked no more after three failures, and comes back by itself."""

    async def main(loop: LeapingLoop) -> None:
        liar = ScriptedDrafter(TEXT, manner=lambda: manner)
        async with rig(text=TEXT, drafters={"liar": [liar]}, failures=EjectionPolicy(eject_s=600)) as router:
            asked = request(max_tokens=30)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert router.counter("proposals_dropped_total", drafter="liar", reason=reason) == 3
            (link,) = router.pools["liar"].links.values()
            assert link.state is PeerState.EJECTED
            assert liar.counts["propose"] == 3
            assert router.counter("accepted_tokens_total") == 0
            liar.manner = lambda: Manner.TRUE
            liar.spoil = 0.0
            loop.leap(600)
            await eventually(lambda: link.is_ready)
            asked = request(max_tokens=30)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert router.counter("accepted_tokens_total") > 0
            await router.nothing_left()

    run_leaping(main)


def test_a_frozen_drafter_stalls_three_rounds_at_most() -> None:
    """A drafter that stops answering costs the deadline until its third failure, and nothing after that."""

    async def main() -> None:
        frozen = ScriptedDrafter(TEXT, manner=lambda: Manner.SILENT)
        good = ScriptedDrafter(TEXT, spoil=0.0)
        tries = CollectionPolicy(soft_deadline_ms=20, hard_deadline_ms=60, quorum=1.0)
        async with rig(
            text=TEXT,
            drafters={"frozen": [frozen], "good": [good]},
            tries=tries,
            failures=EjectionPolicy(eject_s=600, warm_up_s=0.03),
            num_speculative_tokens=3,
        ) as router:
            asked = request(max_tokens=60)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            (link,) = router.pools["frozen"].links.values()
            assert link.state is PeerState.EJECTED
            assert 3 <= frozen.counts["propose"] <= 5
            assert outcome.metrics.num_rounds > 10
            await router.nothing_left()

    asyncio.run(main())


def test_a_long_first_answer_is_no_failure() -> None:
    """Reading a long prompt may take longer than a round: a drafter that answers others meanwhile is not struck."""

    async def main() -> None:
        slow = ScriptedDrafter(TEXT, spoil=0.0)
        failures = EjectionPolicy(eject_s=600, warm_up_s=600)
        async with rig(text=TEXT, drafters={"slow": [slow]}, tries=QUICK_BALLOT, failures=failures) as router:
            slow.manner = lambda: Manner.SILENT
            for _ in range(3):
                await router.generate(request(max_tokens=3))
            (link,) = router.pools["slow"].links.values()
            assert link.is_ready

    asyncio.run(main())


def test_c06_late_doubled_and_stale_answers_are_dropped_and_counted() -> None:
    """An answer that fits no open question is counted and touches nothing."""

    async def main() -> None:
        manners = iter([Manner.LATE, Manner.TRUE, Manner.DOUBLE, Manner.STALE] * 50)
        odd = ScriptedDrafter(TEXT, spoil=0.0, manner=lambda: next(manners))
        odd.late_s = 0.15
        async with rig(text=TEXT, drafters={"odd": [odd]}, tries=QUICK_BALLOT, num_speculative_tokens=3) as router:
            asked = request(max_tokens=80)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            dropped = {
                reason: router.counter("proposals_dropped_total", drafter="odd", reason=reason)
                for reason in ("duplicate", "stale")
            }
            assert dropped["duplicate"] >= 1
            assert dropped["stale"] >= 2
            assert router.counter("accepted_tokens_total") > 0
            await router.nothing_left()

    asyncio.run(main())


def test_c06_an_answer_after_the_deadline_is_late_and_no_part_of_its_round() -> None:
    """It comes while its round is being verified without it: counted, not used, and the next one is."""

    async def main(loop: LeapingLoop) -> None:
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
        async with rig(
            text=TEXT, verifiers=[verifier], drafters={"slow": [drafter]}, tries=tries, num_speculative_tokens=3
        ) as router:
            asked = request(max_tokens=6)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: drafter.counts["propose"] == 1)
            loop.leap(20)
            await eventually(lambda: verifier.counts["verify"] == 1)
            loop.leap(20)
            await eventually(lambda: router.counter("proposals_dropped_total", drafter="slow", reason="late") == 1)
            verifier.thaw()
            outcome = await task
            assert outcome.token_ids == router.plain(asked)[0]
            # Opening, a round of one token without a draft, and one of four.
            assert (outcome.metrics.num_rounds, outcome.metrics.num_accepted_tokens) == (2, 3)
            await router.nothing_left()

    run_leaping(main)


def test_c08_another_tokenizer_is_refused_with_both_fingerprints() -> None:
    """A drafter or verifier that speaks other ids is never used, and the message names both tokenizers."""

    async def main() -> None:
        foreign = ScriptedDrafter(TEXT, tokenizer_fingerprint="permuted")
        async with rig(text=TEXT, drafters={"foreign": [foreign]}, wait_for_drafters=False) as router:
            (link,) = router.pools["foreign"].links.values()
            await eventually(lambda: link.state is PeerState.REFUSED)
            assert "permuted" in (link.refusal or "")
            assert "scripted" in (link.refusal or "")
            asked = request(max_tokens=10)
            assert (await router.generate(asked)).token_ids == router.plain(asked)[0]
            assert foreign.counts["open"] == 0
        good, other = ScriptedVerifier(TEXT), ScriptedVerifier(TEXT, tokenizer_fingerprint="permuted")
        model = ScriptedVerifier(TEXT, model="another-model")
        async with rig(text=TEXT, verifiers=[good]) as router:
            for wrong in (other, model):
                await wrong.start()
                await router.targets.set_addresses([good.address, wrong.address])
                link = router.targets.links[wrong.address]
                await eventually(lambda link=link: link.state is PeerState.REFUSED)
                assert "scripted" in (link.refusal or "")
                await router.generate(request(max_tokens=5))
                assert wrong.counts["open"] == 0
            assert "permuted" not in (router.targets.links[model.address].refusal or "")
            await router.targets.set_addresses([good.address])
            await other.kill()
            await model.kill()

    asyncio.run(main())


def test_a_forgotten_session_is_opened_again_in_the_same_round() -> None:
    """`unknown session` costs one more exchange, no proposal and no token."""

    async def main() -> None:
        manners = iter([Manner.TRUE, Manner.UNKNOWN] * 50)
        forgetful = ScriptedDrafter(TEXT, spoil=0.0, manner=lambda: next(manners))
        async with rig(text=TEXT, drafters={"forgetful": [forgetful]}, num_speculative_tokens=3) as router:
            asked = request(max_tokens=41)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert outcome.metrics.num_rounds == 10
            assert outcome.metrics.drafters["forgetful"].num_accepted_tokens == 30
            assert forgetful.counts["open"] > 5
            await router.nothing_left()

    asyncio.run(main())


def test_c21_a_drafter_past_its_context_is_left_out() -> None:
    """Drafter context 2048, prompt 2040: its proposals are used up to its limit, then the others go on alone."""

    async def main() -> None:
        short = ScriptedDrafter(TEXT, spoil=0.0, context_limit=2048)
        long = ScriptedDrafter(TEXT, spoil=1.0)
        async with rig(text=TEXT, drafters={"short": [short], "long": [long]}) as router:
            asked = request(prompt=[index % 251 for index in range(2040)], max_tokens=50)
            outcome = await router.generate(asked)
            assert outcome.token_ids == router.plain(asked)[0]
            assert outcome.metrics.drafters["short"].num_accepted_tokens > 0
            assert short.longest_prefix_asked < 2048
            assert long.longest_prefix_asked > 2048
            assert router.counter("proposals_dropped_total", drafter="short", reason="too_long") == 0
            await router.nothing_left()

    asyncio.run(main())


def test_replicas_share_the_requests_and_stand_in_for_each_other() -> None:
    """A request uses the least loaded replica, keeps it, and goes on with another one when it dies."""

    async def main() -> None:
        first, second = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=0.0)
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.005
        async with rig(text=TEXT, verifiers=[verifier], drafters={"pool": [first, second]}) as router:
            asked = [request(max_tokens=120) for _ in range(4)]
            tasks = [asyncio.create_task(router.generate(one)) for one in asked]
            await eventually(lambda: first.num_sessions == second.num_sessions == 2)
            await first.kill()
            outcomes = await asyncio.gather(*tasks)
            assert [outcome.token_ids for outcome in outcomes] == [router.plain(one)[0] for one in asked]
            assert second.counts["open"] >= 4
            await first.start()
            await eventually(lambda: all(link.is_ready for link in router.pools["pool"].links.values()))
            await router.nothing_left()

    asyncio.run(main())


def test_all_drafters_dead_is_plain_decoding() -> None:
    """With every drafter gone in mid-stream the text goes on, one token a round, without waiting for deadlines."""

    async def main() -> None:
        drafter = ScriptedDrafter(TEXT, spoil=0.0)
        verifier = ScriptedVerifier(TEXT)
        verifier.step_s = 0.002
        async with rig(
            text=TEXT, verifiers=[verifier], drafters={"only": [drafter]}, num_speculative_tokens=2
        ) as router:
            asked = request(max_tokens=100)
            task = asyncio.create_task(router.generate(asked))
            await eventually(lambda: router.counter("accepted_tokens_total") > 4)
            await drafter.kill()
            outcome = await task
            assert outcome.token_ids == router.plain(asked)[0]
            assert outcome.metrics.num_rounds > outcome.metrics.num_accepted_tokens
            await drafter.start()
            await eventually(lambda: router.pools["only"].is_available)
            again = request(max_tokens=20)
            assert (await router.generate(again)).metrics.num_accepted_tokens > 0
            await router.nothing_left()

    asyncio.run(main())


def test_a_draining_drafter_is_left_in_good_order() -> None:
    """A drafter that says it goes away is asked nothing new, and left once nothing of the router runs there."""

    async def main() -> None:
        leaving, staying = ScriptedDrafter(TEXT, spoil=0.0), ScriptedDrafter(TEXT, spoil=0.0)
        async with rig(text=TEXT, drafters={"pool": [leaving, staying]}) as router:
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

    asyncio.run(main())
