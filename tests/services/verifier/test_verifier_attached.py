"""Drafters attached to the verifier: what they are shown, that no text depends on them, and that they end alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contrib.lookahead import LookaheadDrafter
from moot.core.errors import ConfigError
from moot.core.types import ROOT, Proposal, SamplingParams
from moot.drafters.attached.attached_interface import NO_GUESSES, AttachedAsk, AttachedDrafter, Guesses
from moot.model.cache.kv_cache import depths_of
from moot.model.inputs import SequenceInput
from services.verifier.engine import Engine
from tests.services.verifier.local_sessions import LocalSession
from tests.services.verifier.verifier_driver import (
    FEW_IDS,
    MakeEngine,
    attached_cases,
    drafted_as_plain,
    draw_case,
    play,
    run,
    wish,
)

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


class Scripted(AttachedDrafter):
    """Answers every ask from `say`, and remembers what it was asked."""

    kind = "scripted"

    def __init__(self, say: Callable[[AttachedAsk], list[Proposal]], drafter_id: str = "scripted") -> None:
        self.drafter_id = self.family = drafter_id
        self.say = say
        self.asked: list[list[AttachedAsk]] = []

    def propose(self, asks: Sequence[AttachedAsk]) -> list[list[Proposal]]:
        self.asked.append([replace(ask, token_ids=list(ask.token_ids)) for ask in asks])
        return [self.say(ask) for ask in asks]


def with_inside(engine: Engine, *drafters: AttachedDrafter) -> Engine:
    """The states are kept from here on, as with drafters of the config."""
    engine.serving.attached.drafters = drafters
    engine.serving.steps._keeps_states = True
    engine.runner.keep_states()
    return engine


def scripted_tree(ask: AttachedAsk) -> list[Proposal]:
    """As wide as it may be; right now and then where only a few ids are allowed."""
    return [Proposal((one, 62, one), (1, 2, 3)) for one in FEW_IDS[: ask.width]]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float64", {}), ("float32", {"batch_invariant": True}), ("bfloat16", {"batch_invariant": True})],
    ids=("float64", "batch_invariant", "packed"),
)
def test_texts_with_heads_are_those_without(
    make_engine: MakeEngine, head_flag: str, dtype: str, options: dict[str, Any]
) -> None:
    """Greedy and sampled, with every rule of the sampler; chains and trees; eight requests at once, others arriving
    between: id by id the text of an engine without drafters, and drafts of all lengths were accepted."""
    everything = attached_cases(24)
    plain = make_engine("llama", dtype, **options)
    engine = make_engine("llama", dtype, drafters=(head_flag,), **options)
    results = drafted_as_plain(plain, engine, everything, lambda index: wish("heads", width=1 + 2 * (index % 2)))
    seen: Counter[str] = Counter()
    for one, found in zip(everything, results, strict=True):
        seen["trees"] += sum(not draft.is_chain for draft in found.drafts)
        seen["greedy" if one.params.is_greedy else "sampled"] += 1
        for verification in found.verifications:
            seen[f"accepted {verification.num_accepted}"] += 1
    for name in ("accepted 1", "accepted 2", "trees", "greedy", "sampled"):
        assert seen[name], seen


class Guessing(Scripted):
    """Also feeds a tree of guesses, drawn anew for each step, and remembers it by session and length of the text."""

    def __init__(self) -> None:
        super().__init__(scripted_tree, "guessing")
        self._draw = random.Random(4)
        self.fed: dict[tuple[int, int], Guesses] = {}
        self.ended: list[int] = []

    def guess(self, session: int, token_ids: Sequence[int], num_rows: int, depth: int) -> Guesses:
        count = self._draw.randint(0, 6)
        parents = [ROOT if not place else self._draw.randrange(-1, place) for place in range(count)]
        ids = self._draw.choices([*FEW_IDS, 257, 0], k=count)
        found = Guesses(tuple(ids), tuple(parents))
        if max(depths_of(parents), default=-1) >= depth:
            return NO_GUESSES
        self.fed[session, len(token_ids)] = found
        return found

    def end(self, session: int) -> None:
        self.ended.append(session)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guesses_are_answered_and_never_accepted(make_engine: MakeEngine, dtype: str) -> None:
    """Beside chains and trees, siblings equal to drafted ones included: texts stay those of plain decoding, bit by bit
    in batch-invariant mode, and every guess is answered with what the target says after it in a pass of its own."""
    everything, guessing = attached_cases(10), Guessing()
    plain = make_engine("llama", dtype, batch_invariant=True)
    engine = with_inside(make_engine("llama", dtype, batch_invariant=True), guessing)
    drafted_as_plain(plain, engine, everything, lambda index: wish("guessing", width=1 + 4 * (index % 2)))
    answered = 0
    for ask in (ask for asks in guessing.asked for ask in asks if ask.answers):
        bases = [base for session, base in guessing.fed if session == ask.session and base < len(ask.token_ids)]
        before = ask.token_ids[: max(bases)]
        guesses = guessing.fed[ask.session, max(bases)]
        assert len(ask.answers) == len(guesses.token_ids)
        cache = engine.runner.new_cache()
        parents = [*range(-1, len(before) - 1)]
        parents += [len(before) - 1 if one == ROOT else len(before) + one for one in guesses.parents]
        rows = range(len(before), len(parents))
        inputs = SequenceInput(cache, [*before, *guesses.token_ids], parents, rows)
        (logits,) = engine.runner.forward([inputs])
        cache.free()
        assert tuple(logits[:, : engine.info.vocab_size].argmax(1).tolist()) == ask.answers
        answered += len(guesses.token_ids)
    assert answered > 60
    assert len(set(guessing.ended)) == len(everything)


def test_lookahead_texts_are_plain_ones(make_engine: MakeEngine) -> None:
    """The kind itself, greedy and sampled: the same texts, and where they repeat themselves it is right."""
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    everything = attached_cases(8) + [replace(draw_case(seed), params=long) for seed in range(100, 108)]
    engine = make_engine(drafters=("lookahead:window=3",))
    (drafter,) = engine.serving.attached.drafters
    assert isinstance(drafter, LookaheadDrafter)
    results = drafted_as_plain(make_engine(), engine, everything, lambda _: wish("lookahead", width=2))
    assert sum(one.num_accepted for result in results for one in result.verifications) > 3
    assert drafter.num_sessions == 0


@pytest.mark.parametrize("bad", [Guesses((1, 2), (ROOT,)), Guesses((1,), (0,)), Guesses((1,) * 99, (ROOT,) * 99)])
def test_guesses_that_break_a_step_end_the_drafter(make_engine: MakeEngine, bad: Guesses) -> None:
    """Before they reach one; the sessions go on."""

    class Broken(Scripted):
        def guess(self, session: int, token_ids: Sequence[int], num_rows: int, depth: int) -> Guesses:
            return bad

    engine = with_inside(make_engine(), Broken(lambda ask: []))
    with LocalSession(engine, [1, 2, 3], ENDLESS, **wish("scripted")) as session:
        session.open()
        assert len(session.verify().output_token_ids) == 1
    assert engine.serving.attached.drafters == ()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}], ids=("modules", "packed"))
def test_a_drafter_is_shown_the_state_behind_the_last_token(make_engine: MakeEngine, options: dict[str, str]) -> None:
    """After openings in chunks, chains and trees, whichever row the token came from: the state of a fresh pass over the
    whole text, bit by bit in batch-invariant mode."""
    engine = make_engine(**options, batch_invariant=True, prefill_chunk_tokens=8)
    drafter = Scripted(scripted_tree)
    with_inside(engine, drafter)
    everything = [case for case in attached_cases(16) if case.params.allowed_token_ids == frozenset(FEW_IDS)]
    results = run(engine, [play(one.prompt, one.params, **wish("scripted", width=5)) for one in everything])
    assert sum(one.num_accepted for result in results for one in result.verifications) > 10
    asks = [ask for asks in drafter.asked for ask in asks]
    assert len(asks) > 40
    for ask in asks:
        cache = engine.runner.new_cache()
        before = ask.token_ids[:-1]
        engine.runner.forward([SequenceInput(cache, before, None, (len(before) - 1,))])
        (states,) = engine.runner.states()
        cache.free()
        assert torch.equal(ask.state, states[0])


def test_sessions_that_want_nothing_cost_nothing(make_engine: MakeEngine) -> None:
    """No K, no such drafter among those wanted, no room for a token that could be accepted: not even asked. Those that
    want something are asked together, once a step."""
    drafter = Scripted(lambda ask: [Proposal((5,), (9,))])
    engine = with_inside(make_engine(), drafter)
    params = replace(ENDLESS, max_tokens=4)
    for fields in ({}, {"num_inside_tokens": 3}, wish("other"), {"inside_drafter_ids": ("scripted",)}):
        with LocalSession(engine, [1, 2, 3], params, **fields) as session:
            assert session.open().proposals == session.verify().proposals == ()
    assert drafter.asked == []
    with LocalSession(engine, [1, 2, 3], params, **wish("scripted", num_tokens=9, width=99)) as session:
        assert session.open().proposals == (Proposal((5,), (9,), "scripted"),)
        assert [session.verify().proposals != () for _ in range(3)] == [True, False, False]
    # Of four tokens one is there, and the last is the target's own; then none is left.
    assert [(ask.num_tokens, ask.width) for asks in drafter.asked for ask in asks] == [(2, 16), (1, 16)]


def test_a_drafter_that_fails_ends_and_no_session_does(make_engine: MakeEngine) -> None:
    """Out of memory it misses the step; anything else ends it, and the others go on. Texts stay what they are."""
    errors = iter([torch.OutOfMemoryError("full"), KeyError("bad")])
    calls = Counter[str]()

    def fail(ask: AttachedAsk) -> list[Proposal]:
        calls["bad"] += 1
        if calls["bad"] > 12:
            raise next(errors)
        return [Proposal((7,), (1,))]

    engine = with_inside(make_engine(), Scripted(fail, "bad"), Scripted(lambda ask: [Proposal((8,), (1,))], "good"))
    results = drafted_as_plain(make_engine(), engine, attached_cases(4), lambda _: wish("bad", "good"))
    assert calls["bad"] == 14
    assert [one.drafter_id for one in engine.serving.attached.drafters] == ["good"]
    said = [proposal.drafter_id for one in results for answer in one.verifications for proposal in answer.proposals]
    assert Counter(said)["good"] > Counter(said)["bad"] > 0
    for reason in ("memory", "failed"):
        labels = {"drafter": "bad", "reason": reason}
        assert engine.metrics.registry.get_sample_value("moot_proposals_dropped_total", labels) == 1


def test_a_fault_point_reaches_it(make_engine: MakeEngine, head_flag: str, set_faults: Callable[[str], None]) -> None:
    """What the fault tests of whole systems use: the drafter fails, the request goes on."""
    engine = make_engine(drafters=(head_flag,))
    with LocalSession(engine, [1, 2, 3], ENDLESS, **wish("heads")) as session:
        assert len(session.open().proposals) == 1
        set_faults("verifier.attached=raise")
        assert session.verify().proposals == ()
        set_faults("")
        assert session.verify().proposals == ()
    assert engine.serving.attached.drafters == ()


def test_a_file_that_does_not_fit_is_refused_at_the_start(make_engine: MakeEngine, tmp_path: Path) -> None:
    """As a wrong flag, not as a drafter that fails later."""
    with pytest.raises(ConfigError, match="cannot open recurrent head"):
        make_engine(drafters=(f"heads:path={tmp_path}",))
