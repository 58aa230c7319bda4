"""Path equality: whatever drafters, votes, lengths, shapes and peers do, the text is the target's own."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from moot.core.speculation.collection import CollectionPolicy
from moot.core.types import FinishReason, SamplingParams
from moot.testing import END_TOKEN_ID, Manner, ScriptedDrafter, ScriptedText, ScriptedVerifier
from services.router.generation.request_types import GenerationMetrics, GenerationRequest
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import TARGET, Outcome, Rig, request, rig
from tests.waiting import eventually

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
def test_any_policy_any_drafters_same_text(seed: int) -> None:
    """For drawn votes, shapes, weights, lengths, drafters and parameters the ids and the end are plain decoding's."""

    async def main() -> None:
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
            asked = [drawn_request(draw) for _ in range(16)]
            outcomes = await asyncio.gather(*(router.generate(one) for one in asked))
            for one, outcome in zip(asked, outcomes, strict=True):
                assert (outcome.token_ids, outcome.finish_reason) == router.plain(one)
            await router.nothing_left()

    asyncio.run(main())


def accepted_lengths(metrics: GenerationMetrics) -> Counter[int]:
    """Rounds by the number of draft tokens that they accepted: a chunk may hold several rounds."""
    reached = [metrics.num_rounds, *metrics.num_accepted_tokens_per_position, 0]
    return +Counter({length: here - later for length, (here, later) in enumerate(itertools.pairwise(reached))})


def ended_in_a_draft(outcome: Outcome) -> bool:
    """The opening and each round add one token of the target's own, unless the request ended inside the draft."""
    metrics = outcome.metrics
    return 1 + metrics.num_rounds + metrics.num_accepted_tokens > metrics.num_output_tokens


def test_drafting_is_really_exercised() -> None:
    """The equality above is worth something: accepted lengths 0 to K, losers of a tree accepted, ends inside drafts."""

    async def main() -> None:
        text = ScriptedText(end_period=40)
        lengths: Counter[int] = Counter()
        ends = 0
        async with rig(text=text, drafters=drafters(text), shape="tree", num_speculative_tokens=4) as router:
            for number in range(30):
                asked = request(prompt=[number, 1], max_tokens=60)
                outcome = await router.generate(asked)
                assert (outcome.token_ids, outcome.finish_reason) == router.plain(asked)
                lengths.update(accepted_lengths(outcome.metrics))
                ends += outcome.finish_reason is FinishReason.STOP and ended_in_a_draft(outcome)
            assert set(lengths) == {0, 1, 2, 3, 4}
            assert ends > 3
            assert router.counter("accepted_tokens_total") > 300

    asyncio.run(main())


@dataclass(frozen=True, slots=True)
class Constant(ScriptedText):
    """Every token is the same."""

    token: int = 0

    def token_at(self, position: int, tail: Sequence[int], num_output: int, params: SamplingParams) -> int:
        return self.token


def test_c03_the_first_draft_token_is_checked() -> None:
    """Prompt [1, 1, 1], draft [1], the target says 2: the draft is rejected and 2 comes out."""

    async def main() -> None:
        target, wrong = Constant(token=2), Constant(token=1)
        async with rig(text=target, drafters={"wrong": [ScriptedDrafter(wrong, spoil=0.0)]}) as router:
            outcome = await router.generate(request(prompt=[1, 1, 1], max_tokens=8))
            assert outcome.token_ids == (2,) * 8
            assert outcome.metrics.num_accepted_tokens == 0
            assert outcome.metrics.num_draft_tokens > 0

    asyncio.run(main())


def test_c33_agreement_is_no_verification() -> None:
    """All drafters agree on wrong tokens: the target's come out; empty and invalid ones count as no agreement."""

    async def main() -> None:
        target, wrong = Constant(token=2), Constant(token=1)
        drafter_set = {f"w{index}": [ScriptedDrafter(wrong, spoil=0.0)] for index in range(3)}
        drafter_set["empty"] = [ScriptedDrafter(wrong, manner=lambda: Manner.EMPTY)]
        drafter_set["mute"] = [ScriptedDrafter(wrong, manner=lambda: Manner.ABSTAIN)]
        async with rig(text=target, drafters=drafter_set) as router:
            outcome = await router.generate(request(max_tokens=20))
            assert outcome.token_ids == (2,) * 20
            assert set(outcome.metrics.drafters) == {"w0", "w1", "w2"}
        async with rig(text=target, drafters={"empty": drafter_set["empty"], "mute": drafter_set["mute"]}) as router:
            outcome = await router.generate(request(max_tokens=20))
            assert outcome.token_ids == (2,) * 20
            assert router.total("vote_agreement_ratio_count") == 0
            assert outcome.metrics.num_draft_tokens == 0

    asyncio.run(main())


def test_c04_rows_of_a_batch_do_not_leak() -> None:
    """32 requests with K of 0, 3 and 7 in one batch: each gets the ids and counts that it gets alone."""

    async def main() -> None:
        text = ScriptedText(end_period=60)
        verifier = ScriptedVerifier(text)
        verifier.step_s = 0.002
        good = {"good": [ScriptedDrafter(text, spoil=0.0)]}
        options: dict[str, Any] = {"drafters": good, "num_speculative_tokens": 7}
        async with rig(text=text, verifiers=[verifier], **options) as router:
            asked = [
                request(prompt=[number], max_tokens=50, num_speculative_tokens=(0, 3, 7)[number % 3], seed=number)
                for number in range(32)
            ]
            batched = await asyncio.gather(*(router.generate(one) for one in asked))
            assert verifier.largest_batch > 8
            for one, outcome in zip(asked, batched, strict=True):
                alone = await router.generate(dataclasses.replace(one, request_id=one.request_id + "-alone"))
                assert (outcome.token_ids, outcome.text) == (alone.token_ids, alone.text)
                assert outcome.token_ids == router.plain(one)[0]
                assert outcome.metrics.num_accepted_tokens == alone.metrics.num_accepted_tokens
            await router.nothing_left()

    asyncio.run(main())


def test_c10_an_end_token_inside_a_draft_ends_it() -> None:
    """Nothing after the end token is sent or counted; with ignore_eos the text goes on to max_tokens."""

    async def main() -> None:
        text = ScriptedText(end_period=12)
        perfect = {"perfect": [ScriptedDrafter(text, spoil=0.0)]}
        async with rig(text=text, drafters=perfect, num_speculative_tokens=8) as router:
            attached = 0
            for number in range(20):
                asked = request(prompt=[number], max_tokens=60)
                outcome = await router.generate(asked)
                assert (outcome.token_ids, outcome.finish_reason) == router.plain(asked)
                if outcome.finish_reason is FinishReason.STOP:
                    assert outcome.token_ids[-1] == END_TOKEN_ID
                    assert END_TOKEN_ID not in outcome.token_ids[:-1]
                    attached += ended_in_a_draft(outcome)
                on = await router.generate(request(prompt=[number], max_tokens=60, ignore_eos=True))
                assert len(on.token_ids) == 60
                assert on.finish_reason is FinishReason.LENGTH
            assert attached > 5
            await router.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_c11_max_tokens_is_exact(max_tokens: int) -> None:
    """max_tokens 1 to 9 with K = 8: exactly that many, and the counts say so."""

    async def main() -> None:
        text = ScriptedText()
        perfect = {"perfect": [ScriptedDrafter(text, spoil=0.0)]}
        async with rig(text=text, drafters=perfect, num_speculative_tokens=8) as router:
            outcome = await router.generate(request(max_tokens=max_tokens))
            assert len(outcome.token_ids) == outcome.metrics.num_output_tokens == max_tokens
            assert outcome.finish_reason is FinishReason.LENGTH
            metrics = outcome.metrics
            # As in ended_in_a_draft.
            assert 0 <= 1 + metrics.num_rounds + metrics.num_accepted_tokens - max_tokens <= 1
            await router.nothing_left()

    asyncio.run(main())


def test_c09_a_stop_string_inside_an_accepted_block() -> None:
    """Text, ids, logprobs and counts end at the token that completes the stop string; nothing behind it counts."""

    async def main() -> None:
        text = ScriptedText()
        perfect = {"perfect": [ScriptedDrafter(text, spoil=0.0)]}
        async with rig(text=text, drafters=perfect, num_speculative_tokens=8) as router:
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
            await router.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("drafter_set", ["one", "tie", "three", "late", "dead", "longer", "same tick", "all dead"])
def test_c34_drafter_set_of_every_shape(drafter_set: str) -> None:
    """One drafter, two that tie, three; one late, dead, or dissenting at another length; all at once; none."""

    async def main() -> None:
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
            dead = {"dead": ["d1"], "all dead": list(made)}.get(drafter_set, [])
            for drafter_id in dead:
                await made[drafter_id][0].kill()
            for number in range(4):
                asked = request(prompt=[number], max_tokens=40)
                outcome = await router.generate(asked)
                assert (outcome.token_ids, outcome.finish_reason) == router.plain(asked)
            await eventually(lambda: router.num_left == 0)

    asyncio.run(main())


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
def test_any_fault_schedule_same_text(seed: int) -> None:
    """Drafters late, dead, lying, restarting; verifiers killed, moved, draining, streams cut: the ids stay the same."""

    async def main() -> None:
        draw = random.Random(seed)
        text = ScriptedText(end_period=200)
        verifiers = [ScriptedVerifier(text) for _ in range(3)]
        for verifier in verifiers:
            verifier.step_s = 0.002
        async with rig(
            text=text,
            verifiers=verifiers,
            drafters=drafters(text, seed=seed),
            tries=CollectionPolicy(soft_deadline_ms=10, hard_deadline_ms=30),
            failures=EjectionPolicy(eject_s=0.1, warm_up_s=0.05),
            target=PATIENT_TARGET,
            shape=draw.choice(("chain", "tree")),
        ) as router:
            asked = [dataclasses.replace(drawn_request(draw), request_id=f"chaos-{number}") for number in range(40)]
            asked = [dataclasses.replace(one, params=dataclasses.replace(one.params, max_tokens=60)) for one in asked]
            running = asyncio.gather(*(router.generate(one) for one in asked))
            down: set[ScriptedDrafter] = set()
            for _ in range(12):
                await _fault(draw, router, down)
                await asyncio.sleep(draw.choice((0.0, 0.01, 0.03)))
            outcomes = await running
            for one, outcome in zip(asked, outcomes, strict=True):
                assert (outcome.token_ids, outcome.finish_reason) == router.plain(one)
                assert sum(len(chunk.token_ids) for chunk in outcome.chunks) == outcome.metrics.num_output_tokens
            await router.nothing_left()

    asyncio.run(main())
