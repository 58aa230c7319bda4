"""Path equality: whatever drafters, votes, lengths, shapes and peers do, the text is the target's own."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from moot.core.speculation.collection import CollectionPolicy
from moot.core.types import FinishReason, SamplingParams
from moot.testing import END_TOKEN_ID, Manner, ScriptedDrafter, ScriptedText
from services.router.generation.request_types import GenerationMetrics, GenerationRequest
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import TARGET, Outcome, Rig, request, rig

PATIENT_TARGET = dataclasses.replace(TARGET, max_moves=10_000, max_losses=10_000, suspect_wait_s=0.2)


def drafters(text: ScriptedText, count: int = 3, seed: int = 0) -> dict[str, list[ScriptedDrafter]]:
    spoils = (0.2, 0.6, 1.0)
    return {f"d{index}": [ScriptedDrafter(text, seed=seed + index, spoil=spoils[index % 3])] for index in range(count)}


def drawn_request(draw: random.Random) -> GenerationRequest:
    return request(
        prompt=[draw.randrange(256) for _ in range(draw.randint(1, 30))],
        max_tokens=draw.randint(1, 60),
        temperature=draw.choice((0.0, 1.0)),
        seed=draw.getrandbits(64),
        min_tokens=draw.choice((0, 0, 1)),
        ignore_eos=draw.random() < 0.3,
        stop_token_ids=frozenset(draw.sample(range(256), draw.choice((0, 2)))),
        num_speculative_tokens=draw.choice((None, None, 0, 1, 3, 6)),
    )


@pytest.mark.parametrize("seed", range(12))
async def test_any_policy_any_drafters_same_text(seed: int) -> None:
    """For drawn votes, shapes, weights, lengths, drafters and parameters the ids and the end are plain decoding's."""
    draw = random.Random(seed)
    text = ScriptedText(end_period=draw.choice((0, 30, 97)))
    async with rig(
        text=text,
        drafters=drafters(text, count=draw.randint(0, 3), seed=seed),
        vote=draw.choice(("majority", "calibrated", "accumulated", "best")),
        shape=draw.choice(("chain", "siblings", "tree")),
        weights=draw.choice(("minions", "hedge", "uniform")),
        length=draw.choice(("fixed", "minions", "goodput")),
    ) as router:
        await router.check_all(drawn_request(draw) for _ in range(16))


def accepted_lengths(metrics: GenerationMetrics) -> Counter[int]:
    """Rounds by the number of draft tokens that they accepted: a chunk may hold several rounds."""
    reached = [metrics.num_rounds, *metrics.num_accepted_tokens_per_position, 0]
    return +Counter({length: here - later for length, (here, later) in enumerate(itertools.pairwise(reached))})


def ended_in_a_draft(outcome: Outcome) -> bool:
    """The opening and each round add one token of the target's own, unless the request ended inside the draft."""
    metrics = outcome.metrics
    return 1 + metrics.num_rounds + metrics.num_accepted_tokens > metrics.num_output_tokens


async def test_drafting_is_really_exercised() -> None:
    """The equality above is worth something: accepted lengths 0 to K, losers of a tree accepted, ends inside drafts."""
    text = ScriptedText(end_period=40)
    lengths: Counter[int] = Counter()
    ends = 0
    async with rig(text=text, drafters=drafters(text), shape="tree", num_speculative_tokens=4) as router:
        for number in range(30):
            outcome = await router.check(request(prompt=[number, 1], max_tokens=60))
            lengths.update(accepted_lengths(outcome.metrics))
            ends += outcome.finish_reason is FinishReason.STOP and ended_in_a_draft(outcome)
        assert set(lengths) == {0, 1, 2, 3, 4}
        assert ends > 3
        assert router.counter("accepted_tokens_total") > 300


@dataclass(frozen=True, slots=True)
class Constant(ScriptedText):
    """Every token is the same."""

    token: int = 0

    def token_at(self, position: int, tail: Sequence[int], num_output: int, params: SamplingParams) -> int:
        return self.token


async def test_c03_c33_agreement_is_no_verification() -> None:
    """All drafters agree on wrong tokens: from the first draft token on the target's come out; empty and invalid ones
    count as no agreement."""
    target, wrong = Constant(token=2), Constant(token=1)
    silent = {
        "empty": ScriptedDrafter(wrong, manner=lambda: Manner.EMPTY),
        "mute": ScriptedDrafter(wrong, manner=lambda: Manner.ABSTAIN),
    }
    unanimous = {f"w{index}": ScriptedDrafter(wrong, spoil=0.0) for index in range(3)}
    async with rig(text=target, drafters=unanimous | silent) as router:
        outcome = await router.check(request(max_tokens=20))
        assert outcome.token_ids == (2,) * 20
        assert set(outcome.metrics.drafters) == set(unanimous)
        assert outcome.metrics.num_draft_tokens > outcome.metrics.num_accepted_tokens == 0
    async with rig(text=target, drafters=silent) as router:
        outcome = await router.check(request(max_tokens=20))
        assert router.total("vote_agreement_ratio_count") == 0
        assert outcome.metrics.num_draft_tokens == 0


async def test_c04_rows_of_a_batch_do_not_leak() -> None:
    """32 requests with K of 0, 3 and 7 in one batch: each gets the ids and counts that it gets alone."""
    text = ScriptedText(end_period=60)
    async with rig(text=text, step_s=0.002, drafters={"good": 0.0}, num_speculative_tokens=7) as router:
        asked = [
            request(prompt=[number], max_tokens=50, num_speculative_tokens=(0, 3, 7)[number % 3], seed=number)
            for number in range(32)
        ]
        batched = await router.check_all(asked)
        assert router.verifiers[0].largest_batch > 8
        router.verifiers[0].step_s = 0.0
        for one, outcome in zip(asked, batched, strict=True):
            alone = await router.generate(dataclasses.replace(one, request_id=one.request_id + "-alone"))
            assert (outcome.token_ids, outcome.text) == (alone.token_ids, alone.text)
            assert outcome.metrics.num_accepted_tokens == alone.metrics.num_accepted_tokens


async def test_c10_an_end_token_inside_a_draft_ends_it() -> None:
    """Nothing after the end token is sent or counted; with ignore_eos the text goes on to max_tokens."""
    async with rig(text=ScriptedText(end_period=12), drafters={"perfect": 0.0}, num_speculative_tokens=8) as router:
        attached = 0
        for number in range(20):
            outcome = await router.check(request(prompt=[number], max_tokens=60))
            if outcome.finish_reason is FinishReason.STOP:
                assert outcome.token_ids[-1] == END_TOKEN_ID
                assert END_TOKEN_ID not in outcome.token_ids[:-1]
                attached += ended_in_a_draft(outcome)
            on = await router.generate(request(prompt=[number], max_tokens=60, ignore_eos=True))
            assert len(on.token_ids) == 60
            assert on.finish_reason is FinishReason.LENGTH
        assert attached > 5


async def test_c11_max_tokens_is_exact() -> None:
    """max_tokens 1 to 9 with K = 8: exactly that many, and the counts say so."""
    async with rig(drafters={"perfect": 0.0}, num_speculative_tokens=8) as router:
        for max_tokens in range(1, 10):
            outcome = await router.check(request(max_tokens=max_tokens))
            metrics = outcome.metrics
            assert len(outcome.token_ids) == metrics.num_output_tokens == max_tokens
            assert outcome.finish_reason is FinishReason.LENGTH
            # As in ended_in_a_draft.
            assert 0 <= 1 + metrics.num_rounds + metrics.num_accepted_tokens - max_tokens <= 1


async def test_c09_a_stop_string_inside_an_accepted_block() -> None:
    """Text, ids, logprobs and counts end at the token that completes the stop string; nothing behind it counts."""
    async with rig(drafters={"perfect": 0.0}, num_speculative_tokens=8) as router:
        for number in range(12):
            whole = await router.generate(request(prompt=[number], max_tokens=60, logprobs=1))
            stop = next(
                whole.text[begin : begin + 2]
                for begin in range(8, len(whole.text) - 2)
                if "�" not in whole.text[begin : begin + 2]
            )
            outcome = await router.generate(request(prompt=[number], max_tokens=60, logprobs=1), stops=[stop])
            assert outcome.finish_reason is FinishReason.STOP
            assert outcome.chunks[-1].stop_reason == stop
            assert outcome.text == whole.text[: whole.text.index(stop)]
            assert outcome.token_ids == whole.token_ids[: len(outcome.token_ids)]
            entries = [entry for chunk in outcome.chunks for entry in chunk.logprobs]
            assert len(entries) == len(outcome.token_ids) == outcome.metrics.num_output_tokens
            assert outcome.metrics.num_accepted_tokens < len(outcome.token_ids)


@pytest.mark.parametrize("drafter_set", ["one", "tie", "three", "late", "dead", "longer", "same tick", "all dead"])
async def test_c34_drafter_set_of_every_shape(drafter_set: str) -> None:
    """One drafter, two that tie, three; one late, dead, or dissenting at another length; all at once; none."""
    text = ScriptedText(end_period=97)
    made = drafters(text, count={"one": 1, "tie": 2}.get(drafter_set, 3), seed=5)
    if drafter_set == "tie":
        made["d1"][0].manner = lambda: Manner.WRONG
    if drafter_set == "late":
        made["d1"][0].manner, made["d1"][0].late_s = lambda: Manner.LATE, 0.03
    if drafter_set == "longer":
        made["d2"] = [ScriptedDrafter(Constant(token=9), context_limit=20)]
    if drafter_set == "same tick":
        made = {f"d{index}": [ScriptedDrafter(text, seed=1, spoil=0.5)] for index in range(3)}
    tries = CollectionPolicy(soft_deadline_ms=10, hard_deadline_ms=50)
    async with rig(text=text, drafters=made, tries=tries) as router:
        for drafter_id in {"dead": ["d1"], "all dead": list(made)}.get(drafter_set, []):
            await made[drafter_id][0].kill()
        for number in range(4):
            await router.check(request(prompt=[number], max_tokens=40))


async def _fault(draw: random.Random, router: Rig, down: set[ScriptedDrafter]) -> None:
    """One drawn fault. At least one verifier stays, so that every request can end."""
    pool = [drafter for drafters in router.drafters.values() for drafter in drafters]
    drafter, verifier = draw.choice(pool), draw.choice(router.verifiers)
    match draw.randrange(7):
        case 0 if drafter not in down:
            down.add(drafter)
            await drafter.kill()
        case 1 if down:
            back = down.pop()
            await back.start()
        case 2:
            manners = [Manner.TRUE, draw.choice(list(Manner))]
            drafter.late_s = draw.choice((0.005, 0.03))
            drafter.manner = lambda: draw.choice(manners)
        case 3:
            await verifier.kill()
            await verifier.start()
        case 4:
            verifier.break_streams()
        case 5:
            verifier.drain()
            await asyncio.sleep(0.01)
            await verifier.kill()
            await verifier.start()
        case _:
            verifier.forget = set(draw.sample([f"chaos-{number}" for number in range(40)], 10))
            verifier.double_answers, verifier.stale_answers = draw.random() < 0.5, draw.random() < 0.5


@pytest.mark.parametrize("seed", range(10))
async def test_any_fault_schedule_same_text(seed: int) -> None:
    """Drafters late, dead, lying, restarting; verifiers killed, moved, draining, streams cut: the ids stay the same."""
    draw = random.Random(seed)
    text = ScriptedText(end_period=200)
    async with rig(
        text=text,
        verifiers=3,
        step_s=0.002,
        drafters=drafters(text, seed=seed),
        tries=CollectionPolicy(soft_deadline_ms=10, hard_deadline_ms=30),
        failures=EjectionPolicy(eject_s=0.1, warm_up_s=0.05),
        target=PATIENT_TARGET,
        shape=draw.choice(("chain", "tree")),
    ) as router:
        asked = [dataclasses.replace(drawn_request(draw), request_id=f"chaos-{number}") for number in range(40)]
        asked = [dataclasses.replace(one, params=dataclasses.replace(one.params, max_tokens=60)) for one in asked]
        running = router.begin(asked)
        down: set[ScriptedDrafter] = set()
        for _ in range(12):
            await _fault(draw, router, down)
            await asyncio.sleep(draw.choice((0.0, 0.01, 0.03)))
        for outcome in await running:
            assert sum(len(chunk.token_ids) for chunk in outcome.chunks) == outcome.metrics.num_output_tokens
