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
from moot.core.types import ROOT, Draft, Proposal, SamplingParams
from moot.drafters.attached.attached_interface import NO_GUESSES, AttachedAsk, AttachedDrafter, Guesses
from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape
from moot.model.cache.kv_cache import depths_of
from moot.model.inputs import SequenceInput
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from services.verifier.commands import Failed, Open, Verify
from services.verifier.engine import Engine
from tests.services.verifier.local_sessions import LocalSession
from tests.services.verifier.test_verifier_service import Client, Served, opening, verifying, with_server
from tests.services.verifier.verifier_driver import Case, MakeEngine, Play, Result, draw_case, play, run, session_ids

IDS = (60, 61, 62, 63, 64)
NUM_TOKENS = 4


@pytest.fixture(scope="session")
def head_flag(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head with random weights over a few ids: it is right now and then where only these are allowed."""
    folder = tmp_path_factory.mktemp("inside-head")
    head = RecurrentHead(RecurrentHeadShape(64, 16, 100, 2), torch.arange(40, 140))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    head.save(folder, {})
    return f"heads:path={folder}:max_tokens={NUM_TOKENS}"


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


def tree_of(proposals: Sequence[Proposal]) -> Draft:
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    parents: list[int] = []
    for proposal in proposals:
        for end in range(1, len(proposal.token_ids) + 1):
            path = proposal.token_ids[:end]
            if path not in nodes:
                nodes[path] = len(parents)
                parents.append(nodes[path[:-1]])
    return Draft(tuple(path[-1] for path in list(nodes)[1:]), tuple(parents))


def play_inside(case: Case, width: int, drafter_ids: tuple[str, ...] = ("heads",)) -> Play:
    """Every round verifies what came with the last answer: one chain, or with `width` a tree."""
    result, session_id, round_index = Result(), next(session_ids), 0
    command: Any = Open(
        session_id,
        "inside",
        case.prompt,
        case.params,
        inside_drafter_ids=drafter_ids,
        inside_width=width,
        num_inside_tokens=NUM_TOKENS,
    )
    while True:
        answer = yield [command]
        if isinstance(answer, Failed):
            result.failure = answer
            return result
        one = answer.verification
        result.verifications.append(one)
        result.output_token_ids += one.output_token_ids
        result.finish_reason = one.finish_reason
        if one.finish_reason is not None:
            assert one.proposals == ()
            return result
        round_index += 1
        draft = tree_of(one.proposals)
        result.drafts.append(draft)
        base = len(case.prompt) + len(result.output_token_ids)
        command = Verify(session_id, round_index, base, draft, NUM_TOKENS)


def cases(number: int) -> list[Case]:
    """Drawn ones, each also with few allowed ids, among which guesses are often right."""
    found = []
    for seed in range(number):
        case = draw_case(seed)
        params = replace(case.params, max_tokens=12, min_tokens=0)
        found.append(replace(case, params=params))
        found.append(replace(case, params=replace(params, allowed_token_ids=frozenset(IDS), logit_bias={})))
    return found


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
    everything = cases(24)
    plain = run(make_engine("llama", dtype, **options), [play(one.prompt, one.params) for one in everything])
    engine = make_engine("llama", dtype, drafters=(head_flag,), **options)
    results = run(engine, [play_inside(one, 1 + 2 * (number % 2)) for number, one in enumerate(everything)])
    seen: Counter[str] = Counter()
    for one, expected, found in zip(everything, plain, results, strict=True):
        assert (found.output_token_ids, found.finish_reason) == (expected.output_token_ids, expected.finish_reason)
        seen["trees"] += sum(not draft.is_chain for draft in found.drafts)
        seen["greedy" if one.params.is_greedy else "sampled"] += 1
        for verification in found.verifications:
            seen[f"accepted {verification.num_accepted}"] += 1
    for name in ("accepted 1", "accepted 2", "trees", "greedy", "sampled"):
        assert seen[name], seen


class Guessing(Scripted):
    """Also feeds a tree of guesses, drawn anew for each step, and remembers it by session and length of the text."""

    def __init__(self) -> None:
        super().__init__(lambda ask: [Proposal((one, 62, one), (1, 2, 3)) for one in IDS[: ask.width]], "guessing")
        self._draw = random.Random(4)
        self.fed: dict[tuple[int, int], Guesses] = {}
        self.ended: list[int] = []

    def guess(self, session: int, token_ids: Sequence[int], num_rows: int, depth: int) -> Guesses:
        count = self._draw.randint(0, 6)
        parents = [ROOT if not place else self._draw.randrange(-1, place) for place in range(count)]
        ids = self._draw.choices([*IDS, 257, 0], k=count)
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
    everything = cases(10)
    plain = run(make_engine("llama", dtype, batch_invariant=True), [play(one.prompt, one.params) for one in everything])
    engine = make_engine("llama", dtype, batch_invariant=True)
    guessing = Guessing()
    with_inside(engine, guessing)
    results = run(
        engine, [play_inside(one, 1 + 4 * (number % 2), ("guessing",)) for number, one in enumerate(everything)]
    )
    for expected, found in zip(plain, results, strict=True):
        assert (found.output_token_ids, found.finish_reason) == (expected.output_token_ids, expected.finish_reason)
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
    everything = cases(8) + [replace(draw_case(seed), params=long) for seed in range(100, 108)]
    plain = run(make_engine("llama", "float64"), [play(one.prompt, one.params) for one in everything])
    engine = make_engine("llama", "float64", drafters=("lookahead:window=3",))
    (drafter,) = engine.serving.attached.drafters
    assert isinstance(drafter, LookaheadDrafter)
    results = run(engine, [play_inside(one, 2, ("lookahead",)) for one in everything])
    for expected, found in zip(plain, results, strict=True):
        assert (found.output_token_ids, found.finish_reason) == (expected.output_token_ids, expected.finish_reason)
    assert sum(one.num_accepted for result in results for one in result.verifications) > 3
    assert drafter.num_sessions == 0


@pytest.mark.parametrize("bad", [Guesses((1, 2), (ROOT,)), Guesses((1,), (0,)), Guesses((1,) * 99, (ROOT,) * 99)])
def test_guesses_that_break_a_step_end_the_drafter(make_engine: MakeEngine, bad: Guesses) -> None:
    """Before they reach one; the sessions go on."""

    class Broken(Scripted):
        def guess(self, session: int, token_ids: Sequence[int], num_rows: int, depth: int) -> Guesses:
            return bad

    engine = with_inside(make_engine(start=True), Broken(lambda ask: []))
    wish: dict[str, Any] = {"inside_drafter_ids": ("scripted",), "num_inside_tokens": 2}
    with LocalSession(engine, [1, 2, 3], SamplingParams(temperature=0.0, ignore_eos=True), **wish) as session:
        session.open()
        assert len(session.verify().output_token_ids) == 1
    assert engine.serving.attached.drafters == ()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}], ids=("modules", "packed"))
def test_a_drafter_is_shown_the_state_behind_the_last_token(make_engine: MakeEngine, options: dict[str, str]) -> None:
    """After openings in chunks, chains and trees, whichever row the token came from: the state of a fresh pass over the
    whole text, bit by bit in batch-invariant mode."""
    engine = make_engine(**options, batch_invariant=True, prefill_chunk_tokens=8)
    drafter = Scripted(lambda ask: [Proposal((one, 62, one), (1, 2, 3)) for one in IDS[: ask.width]])
    with_inside(engine, drafter)
    everything = [case for case in cases(16) if case.params.allowed_token_ids == frozenset(IDS)]
    results = run(engine, [play_inside(one, 5, ("scripted",)) for one in everything])
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
    engine = with_inside(make_engine(start=True), drafter)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for wish in ({}, {"num_inside_tokens": 3}, {"num_inside_tokens": 3, "inside_drafter_ids": ("other",)}):
        with LocalSession(engine, [1, 2, 3], params, **wish) as session:  # type: ignore[arg-type]
            assert session.open().proposals == session.verify().proposals == ()
    with LocalSession(engine, [1, 2, 3], params, inside_drafter_ids=("scripted",)) as session:
        assert session.open().proposals == ()
    assert drafter.asked == []
    with LocalSession(
        engine, [1, 2, 3], params, inside_drafter_ids=("scripted",), num_inside_tokens=9, inside_width=99
    ) as session:
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
    everything = cases(4)
    plain = run(make_engine(), [play(one.prompt, one.params) for one in everything])
    results = run(engine, [play_inside(one, 1, ("bad", "good")) for one in everything])
    assert [one.output_token_ids for one in results] == [one.output_token_ids for one in plain]
    assert not any(one.failure for one in results)
    assert calls["bad"] == 14
    assert [one.drafter_id for one in engine.serving.attached.drafters] == ["good"]
    said = [proposal.drafter_id for one in results for answer in one.verifications for proposal in answer.proposals]
    assert Counter(said)["good"] > Counter(said)["bad"] > 0
    for reason in ("memory", "failed"):
        labels = {"drafter": "bad", "reason": reason}
        assert engine.metrics.registry.get_sample_value("moot_proposals_dropped_total", labels) == 1


def test_a_fault_point_reaches_it(make_engine: MakeEngine, head_flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fault tests of whole systems use: the drafter fails, the request goes on."""
    from moot.runtime import faults

    engine = make_engine(drafters=(head_flag,), start=True)
    wish: dict[str, Any] = {"inside_drafter_ids": ("heads",), "num_inside_tokens": 2}
    with LocalSession(engine, [1, 2, 3], SamplingParams(temperature=0.0, ignore_eos=True), **wish) as session:
        assert len(session.open().proposals) == 1
        monkeypatch.setattr(faults, "_active", faults.parse_faults("verifier.attached=raise"))
        assert session.verify().proposals == ()
        monkeypatch.setattr(faults, "_active", {})
        assert session.verify().proposals == ()
    assert engine.serving.attached.drafters == ()


def test_heads_over_the_wire(make_engine: MakeEngine, head_flag: str) -> None:
    """Describe tells them; openings and verifies carry the wish, answers the proposals and what they took."""
    engine = make_engine(drafters=(head_flag,))
    text = random.Random(1).choices(range(200), k=20)
    command = opening(1, text)
    command.open.inside_drafter_ids.append("heads")
    command.open.inside_width = 2
    command.open.num_inside_tokens = 3

    async def body(server: Served) -> None:
        stub = pb_grpc.VerifierServiceStub(server.channel)
        described = await stub.Describe(pb.DescribeVerifierRequest())
        assert [(one.drafter_id, one.kind, one.family) for one in described.drafters] == [("heads", "heads", "heads")]
        client = Client(server.channel)
        await client.send(command)
        (opened,) = await client.answers(1)
        proposals = opened.opened.proposals
        assert [len(one.token_ids) for one in proposals] == [len(one.confidences) for one in proposals] == [3, 3]
        assert {one.drafter_id for one in proposals} == {"heads"}
        assert opened.opened.timing.inside_us > 0
        for round_index, wanted in ((1, 0), (2, 1)):
            next_one = verifying(1, Draft(), round_index, len(text) + round_index)
            next_one.verify.num_inside_tokens = wanted
            await client.send(next_one)
            (answer,) = await client.answers(1)
            assert [len(one.token_ids) for one in answer.verified.proposals] == [wanted] * 2 * wanted
            assert (answer.verified.timing.inside_us > 0) == bool(wanted)
        client.call.cancel()

    with_server(engine, body)


def test_a_file_that_does_not_fit_is_refused_at_the_start(make_engine: MakeEngine, tmp_path: Path) -> None:
    """As a wrong flag, not as a drafter that fails later."""
    from moot.core.errors import ConfigError

    with pytest.raises(ConfigError, match="cannot open recurrent head"):
        make_engine(drafters=(f"heads:path={tmp_path}",))
