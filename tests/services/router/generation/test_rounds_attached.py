"""Drafters attached to the verifier in the rounds of a router: like every other drafter, without a question of
their own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from moot.core.generation import Generation
from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.length import LengthPolicy, Load
from moot.core.speculation.policy import SpeculationOptions, make_policy
from moot.core.types import Proposal, SamplingParams, Verification
from moot.runtime.metrics import Metrics
from moot.testing import ScriptedText, ScriptedVerifier
from moot.testing.scripted_sessions import VerifiedSession
from services.router.generation.drafter_set import DrafterSet
from services.router.generation.ports import Prefix
from tests.services.router.generation.rounds_rig import BALLOT, TEXT, request, rig
from tests.services.router.generation.test_rounds_equality import drafters, drawn_request
from tests.waiting import eventually

Rule = Callable[[VerifiedSession, int, int], Sequence[tuple[int, ...]]]


def guesses(spoil: float, seed: int = 0, text: ScriptedText = TEXT) -> Rule:
    """The true text, spoilt at a drawn place as often as `spoil` says; further chains are wrong from the start."""
    draw = random.Random(seed)

    def rule(session: VerifiedSession, num_tokens: int, width: int) -> list[tuple[int, ...]]:
        ids = text.continuation(session.prefix, session.num_output, session.params, num_tokens)
        if draw.random() < spoil:
            place = draw.randrange(num_tokens)
            ids[place] = (ids[place] + 1) % 256
        wrong = [((ids[0] + 2 + number) % 256,) for number in range(width - 1)]
        return [tuple(ids), *wrong]

    return rule


def with_inside(text: ScriptedText = TEXT, **rules: Rule) -> ScriptedVerifier:
    verifier = ScriptedVerifier(text)
    verifier.attached = rules
    return verifier


@pytest.mark.parametrize("seed", range(6))
async def test_texts_with_drafters_inside_are_plain_ones(seed: int) -> None:
    """Chains and trees, greedy and sampled, beside other drafters and alone, in any policy; and they are of use."""
    draw = random.Random(seed)
    text = ScriptedText(end_period=draw.choice((0, 60)))
    verifier = with_inside(text, heads=guesses(0.5, seed, text), self=guesses(0.9, seed + 1, text))
    async with rig(
        text=text,
        verifiers=[verifier],
        drafters=drafters(text, count=seed % 3, seed=seed),
        tries=replace(BALLOT, width=1 + seed % 2),
        shape=draw.choice(("chain", "siblings", "tree")),
        vote=draw.choice(("majority", "calibrated")),
        length=draw.choice(("fixed", "goodput")),
    ) as router:
        await router.check_all(drawn_request(draw) for _ in range(16))
        assert router.total("proposals_accepted_tokens_total") > 50
        assert router.counter("proposals_accepted_tokens_total", drafter="heads") > 0


async def test_they_are_drafters_like_any_other() -> None:
    """Known by name, counted, weighed and calibrated; alone they draft, and a round of theirs waits for nobody."""
    async with rig(verifiers=[with_inside(heads=guesses(0.0))]) as router:
        assert router.drafter_set.drafter_ids == {"heads"}
        assert router.drafter_set.policy.families == {"heads": "scripted"}
        outcome = await router.generate(request(max_tokens=36, num_speculative_tokens=4, drafters=("heads",)))
        metrics = outcome.metrics
        # The opening, then four accepted and one more per round.
        assert (metrics.num_rounds, metrics.num_accepted_tokens) == (7, 28)
        assert metrics.drafters["heads"].num_votes_won == 7
        assert router.counter("drafter_weight", drafter="heads") == 1.0
        assert router.total("proposals_dropped_total") == 0


async def test_they_are_wished_for_by_those_who_want_them() -> None:
    """Nothing is wished for a request without drafting or with other drafters; else as much as the round may draft."""
    verifier = with_inside(heads=guesses(0.5))
    async with rig(verifiers=[verifier], drafters={"d0": 0.2}) as router:
        for wish in ({"num_speculative_tokens": 0}, {"drafters": ("d0",)}, {"drafters": ()}):
            await router.generate(request(max_tokens=20, **wish))
            assert verifier.wishes
            assert not any(verifier.wishes)
            verifier.wishes.clear()
        for number in (2, None):
            await router.generate(request(max_tokens=30, num_speculative_tokens=number))
            most = number or 6
            assert max(verifier.wishes) == most
            assert verifier.wishes[0] == most
            verifier.wishes.clear()


async def test_a_move_loses_no_more_than_a_proposal() -> None:
    """A verifier dies with the proposals under way; the next one answers the opening with its own, or has none."""
    for second in (with_inside(heads=guesses(0.2)), ScriptedVerifier(TEXT)):
        first = with_inside(heads=guesses(0.2))
        async with rig(verifiers=[first, second]) as router:
            await router.ready(2)
            task = asyncio.create_task(router.check(request(max_tokens=60)))
            await eventually(lambda first=first, second=second: first.counts["verify"] + second.counts["verify"] > 2)
            await (first if first.counts["verify"] else second).kill()
            await task


async def test_what_makes_no_sense_is_dropped_and_counted() -> None:
    """Ids outside the vocabulary, nothing at all, too many; too long is cut, since K was not known. Texts stay."""

    def longer(session: VerifiedSession, num_tokens: int, width: int) -> list[tuple[int, ...]]:
        return [tuple(TEXT.continuation(session.prefix, session.num_output, session.params, num_tokens + 5))]

    rules: dict[str, Rule] = {
        "outside": lambda session, num_tokens, width: [(5, 257)],
        "empty": lambda session, num_tokens, width: [()],
        "many": lambda session, num_tokens, width: [(1,), (2,), (3,)],
        "long": longer,
    }
    async with rig(verifiers=[with_inside(**rules)], length="fixed") as router:
        outcome = await router.check(request(max_tokens=40))
        for drafter, reason in (("outside", "vocabulary"), ("empty", "empty"), ("many", "too_many")):
            assert router.counter("proposals_dropped_total", drafter=drafter, reason=reason) > 2
        assert outcome.metrics.drafters["long"].num_accepted_tokens > 20


async def test_an_id_of_another_drafter_stays_with_that() -> None:
    """A verifier cannot take a name over; its drafter has no vote."""
    async with rig(drafters={"d0": 0.2}) as router:
        (verifier,) = router.verifiers
        source = router.drafter_set.sources["d0"]
        verifier.attached = {"d0": guesses(0.0)}
        verifier.break_streams()
        link = router.targets.links[verifier.address]
        await eventually(lambda: link.facts is not None and len(link.facts.drafters) == 1 and link.is_ready)
        assert router.drafter_set.sources["d0"] is source
        await router.generate(request(max_tokens=10))
        assert not any(verifier.wishes)


class Lengths(LengthPolicy):
    def __init__(self, *lengths: int) -> None:
        self._left = list(lengths)

    def next_length(self, load: Load) -> int:
        return self._left.pop(0)


async def test_a_probe_waits_for_drafters_that_have_not_been_asked() -> None:
    """Where K was 0, nothing was wished: a round that may draft again wishes, and drafts at the next one, so that such
    drafters are judged by what they say."""
    pool = make_policy(SpeculationOptions(num_speculative_tokens=6, length="fixed"))
    drafter_set = DrafterSet(pool, CollectionPolicy(), Metrics())
    drafter_set.admit_attached("heads", "heads")
    prefix = Prefix("one", (1, 2, 3), SamplingParams(max_tokens=50))
    generation = Generation((1, 2, 3), prefix.params, prefix.output_token_ids)
    request_drafters = drafter_set.open(prefix, None, None)
    request_drafters._policy._length = Lengths(6, 0, 0, 2, 0, 0)
    assert prefix.attached is not None
    assert prefix.attached.num_tokens == 6
    drafted = []
    for _ in range(6):
        length = len(prefix)
        generation.output_token_ids.append(7)
        wished = prefix.attached.num_tokens
        proposals = (Proposal((9,) * wished, (1,) * wished, "heads"),) if wished else ()
        request_drafters.hear_attached(Verification(length, 0, (7,), proposals=proposals))
        plan = request_drafters.plan(generation, 100, 16)
        found = await request_drafters.collect(request_drafters.ask(plan), plan, 300)
        drafted.append((plan.num_speculative_tokens, prefix.attached.num_tokens, [len(one.token_ids) for one in found]))
    assert drafted == [(6, 6, [6]), (0, 0, []), (0, 0, []), (0, 2, []), (2, 2, [2]), (0, 0, [])]
