"""What is counted: per request and over all, with the same sums, and never more accepted than drafted."""

from __future__ import annotations

import asyncio

from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from tests.services.router.generation.rounds_rig import TEXT, request, rig


async def test_c30_request_sums_equal_counter_deltas() -> None:
    """Over mixed requests, stops included: counters move by exactly what the requests report, the last round of each
    included; the invariants hold; no scrape holds a NaN, before the first request or behind the last."""
    text = ScriptedText(end_period=50)
    drafters = {"a": ScriptedDrafter(text, seed=1, spoil=0.3), "b": ScriptedDrafter(text, seed=2, spoil=0.8)}
    async with rig(text=text, drafters=drafters, shape="tree") as router:
        assert b"NaN" not in router.metrics.exposition()
        asked = [
            request(
                prompt=[number, 7],
                max_tokens=30 + number,
                num_speculative_tokens=(None, 0, 2)[number % 3],
                drafters=(None, ("a",))[number % 2],
            )
            for number in range(18)
        ]
        outcomes = await asyncio.gather(
            *(router.generate(one, stops=["e"] if index % 4 == 0 else []) for index, one in enumerate(asked))
        )
        all_metrics = [outcome.metrics for outcome in outcomes]
        assert router.counter("rounds_total") == sum(metrics.num_rounds for metrics in all_metrics)
        assert router.counter("draft_tokens_total") == sum(metrics.num_draft_tokens for metrics in all_metrics)
        accepted = sum(metrics.num_accepted_tokens for metrics in all_metrics)
        assert router.counter("accepted_tokens_total") == accepted
        assert router.total("accepted_tokens_per_position_total") == accepted
        assert router.counter("generation_tokens_total") == sum(len(outcome.token_ids) for outcome in outcomes)
        for drafter_id in drafters:
            mine = [metrics.drafters[drafter_id] for metrics in all_metrics if drafter_id in metrics.drafters]
            proposed = router.counter("proposal_tokens_total", drafter=drafter_id)
            right = router.counter("proposals_accepted_tokens_total", drafter=drafter_id)
            assert proposed == sum(metrics.num_proposed_tokens for metrics in mine)
            assert right == sum(metrics.num_accepted_tokens for metrics in mine)
            assert router.counter("votes_won_total", drafter=drafter_id) == sum(m.num_votes_won for m in mine)
            assert 0 < right <= proposed
        for metrics in all_metrics:
            assert 0 <= metrics.num_accepted_tokens <= metrics.num_draft_tokens
            assert sum(metrics.num_accepted_tokens_per_position) == metrics.num_accepted_tokens
        for one, metrics in zip(asked, all_metrics, strict=True):
            if one.num_speculative_tokens == 0:
                assert metrics.num_draft_tokens == 0
                assert not metrics.drafters
            if one.drafters:
                assert set(metrics.drafters) <= {"a"}
        assert b"NaN" not in router.metrics.exposition()


async def test_a_move_is_no_round() -> None:
    """The token that a new verifier's opening brings is counted as generated and as nothing else."""
    async with rig(verifiers=2, step_s=0.002) as router:
        task = await router.started(request(request_id="moving", max_tokens=60))
        for verifier in router.verifiers:
            verifier.forget = {"moving"}
        outcome = await task
        moves = router.counter("request_moves_total", reason="unknown_session")
        assert moves in (1, 2)
        assert outcome.metrics.num_rounds == 60 - 1 - moves


async def test_fixed_k_is_respected() -> None:
    """num_speculative_tokens n asks for n, 0 for none; absent leaves it to the policy."""
    async with rig(drafters={"perfect": 0.0}, num_speculative_tokens=6) as router:
        for length, rounds in ((0, 60), (1, 30), (2, 20), (4, 12), (None, 9)):
            outcome = await router.check(request(max_tokens=1 + 12 * 5, num_speculative_tokens=length))
            assert outcome.metrics.num_rounds == rounds


async def test_the_pool_of_drafts_is_bounded_end_to_end() -> None:
    """With a batch of 2 and 12 requests the verifier never sees more than 2 running and 2 waiting drafts."""
    verifier, deepest = ScriptedVerifier(TEXT, max_num_seqs=2), 0.0
    async with rig(verifiers=[verifier], step_s=0.001, drafters={"d": 0.5}, num_speculative_tokens=2) as router:
        tasks = [asyncio.create_task(router.generate(request(max_tokens=30))) for _ in range(12)]
        await asyncio.wait(tasks, timeout=0.05)
        (link,) = router.targets.links.values()
        while not all(task.done() for task in tasks):
            deepest = max(deepest, router.counter("pool_depth"))
            assert link.pool.depth <= 2
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert 0 < deepest <= 2
        assert verifier.largest_batch == 2
