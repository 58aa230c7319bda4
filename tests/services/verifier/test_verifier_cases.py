"""Kinds of mistakes that systems of this sort have made, one test per kind, named after it."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moot.core.errors import (
    Draining,
    InvalidRequest,
    NoCapacity,
    OutOfMemory,
    PeerError,
    RequestPoisoned,
    UnknownSession,
)
from moot.core.types import ROOT, Draft, FinishReason, SamplingParams
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.runtime import faults
from services.verifier.commands import Abort, Answer, Failed, Finish, Open, Opened, Verified, Verify
from services.verifier.engine import Engine
from services.verifier.sessions import PendingWork
from tests.services.verifier.verifier_driver import MakeEngine, Result, Script, play, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
END = 258


def one(engine: Engine, *args: object, **options: object) -> Result:
    (result,) = run(engine, [play(*args, **options)])  # type: ignore[arg-type]
    return result


def talk(engine: Engine, *commands: object) -> list[Answer]:
    """Answers to commands sent one after another on one stream, which is closed afterwards."""
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    for command in commands:
        engine.submit(stream, [command])  # type: ignore[list-item]
        while engine.step():
            pass
    engine.disconnect(stream)
    engine.step()
    return answers


def chain_after(text: tuple[int, ...], k: int) -> object:
    return lambda output: Draft.chain(text[len(output) : len(output) + k])


def test_c01_equal_maxima_are_broken_alike_on_both_paths(make_engine: MakeEngine) -> None:
    """Two ids with the same highest logit: the lowest wins, drafted or not, in float32."""
    engine = make_engine(dtype="float32", batch_invariant=True)
    with torch.inference_mode():
        head = engine.runner.loaded.model.get_output_embeddings().weight
        saved = head.clone()
        head[100:200] = head[:100]
    try:
        plain = one(engine, [3, 4], GREEDY)
        assert any(token_id < 100 for token_id in plain.output_token_ids)
        assert not any(100 <= token_id < 200 for token_id in plain.output_token_ids)
        twin = tuple(token_id + 100 if token_id < 100 else token_id for token_id in plain.output_token_ids)
        for text in (plain.output_token_ids, twin):
            assert one(engine, [3, 4], GREEDY, chain_after(text, 4)).output_token_ids == plain.output_token_ids
    finally:
        with torch.inference_mode():
            head[:] = saved


def test_c03_the_first_draft_token_is_checked(make_engine: MakeEngine) -> None:
    """Prompt [1, 1, 1], a draft of one wrong id: nothing accepted, the target's own id comes out."""
    engine = make_engine()
    plain = one(engine, [1, 1, 1], GREEDY)
    wrong = (plain.output_token_ids[1] + 1) % 256
    answers = talk(engine, Open(1, "r", (1, 1, 1), GREEDY), Verify(1, 1, 4, Draft.chain((wrong,))))
    assert isinstance(answers[1], Verified)
    assert answers[1].verification.num_accepted == 0
    assert answers[1].verification.output_token_ids == plain.output_token_ids[1:2]


def test_c04_rows_of_a_ragged_batch_do_not_leak(make_engine: MakeEngine) -> None:
    """32 requests, K of 0, 3 and 7 side by side, accepted lengths that differ: identical to each alone."""
    engine = make_engine(max_num_seqs=32)
    prompts = [[number, *range(number % 9)] for number in range(32)]
    params = [replace(GREEDY, temperature=number % 2 * 1.0, seed=number, logprobs=1) for number in range(32)]
    jobs = list(zip(prompts, params, strict=True))
    alone = [one(engine, prompt, own) for prompt, own in jobs]
    scripts = [Script(alone[n].output_token_ids, (0, 3, 7)[n % 3], random.Random(n)) for n in range(32)]
    plays = [play(prompt, own, script) for (prompt, own), script in zip(jobs, scripts, strict=True)]
    batched = run(engine, plays, at_once=32)
    assert max(one.batch_requests for result in batched for one in result.verifications) >= 30
    for ours, theirs in zip(batched, alone, strict=True):
        assert ours.output_token_ids == theirs.output_token_ids
        for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-5)


def test_c06_a_late_or_doubled_command_changes_nothing(make_engine: MakeEngine) -> None:
    """A verify sent twice is answered once and counted; one for a session that is gone gets UNKNOWN_SESSION."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    verify = Verify(1, 1, 2, Draft.chain(text[1:3]))
    answers = talk(
        engine,
        Open(1, "r", (5,), GREEDY),
        verify,
        verify,
        Open(1, "r", (5,), GREEDY),
        Verify(1, 2, 5, Draft()),
        Abort(1),
        Verify(1, 3, 6, Draft()),
    )
    assert [type(answer) for answer in answers] == [Opened, Verified, Verified, Failed]
    assert answers[1].verification.output_token_ids + answers[2].verification.output_token_ids == text[1:5]  # type: ignore[union-attr]
    assert answers[3] == Failed(1, UnknownSession, "no such session: open it again", 3)
    dropped = engine.metrics.answers_dropped
    assert dropped.labels(role="router", reason="stale_round")._value.get() == 1
    assert dropped.labels(role="router", reason="doubled_open")._value.get() == 1


def test_c06_a_wrong_base_length_ends_that_session_only(make_engine: MakeEngine) -> None:
    """Sides that disagree about the text do not go on: INVALID, the other session is untouched."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    answers = talk(
        engine,
        Open(1, "a", (5,), GREEDY),
        Open(2, "b", (5,), GREEDY),
        Verify(1, 1, 3, Draft()),
        Verify(2, 1, 2, Draft.chain(text[1:4])),
    )
    assert isinstance(answers[2], Failed)
    assert (answers[2].session_id, answers[2].error) == (1, InvalidRequest)
    assert isinstance(answers[3], Verified)
    assert answers[3].verification.num_accepted == 3


@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain((259,)),
        Draft.chain((3, 299)),
        Draft.chain((2**32 - 1,)),
        Draft((1, 2), (-1, 1)),
        Draft((1, 2), (-1, 5)),
        Draft((1, 2), (-2, 0)),
        Draft((1, 2), (-1,)),
        Draft((1, 1), (-1, -1)),
        Draft.chain((1,) * 65),
    ],
)
def test_c07_malformed_drafts_are_refused_and_harm_nobody(make_engine: MakeEngine, draft: Draft) -> None:
    """Ids in the model's padding (259 to 299) or outside, parents that make no tree, twins, too many: INVALID."""
    engine = make_engine()
    answers = talk(engine, Open(1, "r", (5,), GREEDY), Verify(1, 1, 2, draft), Open(2, "s", (5,), GREEDY))
    assert isinstance(answers[1], Failed)
    assert answers[1].error is InvalidRequest
    assert isinstance(answers[2], Opened)
    assert answers[2].verification.output_token_ids == answers[0].verification.output_token_ids  # type: ignore[union-attr]


def test_c07_padding_ids_never_come_out(make_engine: MakeEngine) -> None:
    """The model's vocabulary is larger than the tokenizer's: however likely, its padding is never sampled."""
    engine = make_engine(dtype="float32", batch_invariant=True)
    with torch.inference_mode():
        head = engine.runner.loaded.model.get_output_embeddings().weight
        saved = head[259:].clone()
        head[259:] = head[:41] * 5
    try:
        params = [replace(GREEDY, temperature=temperature, seed=1) for temperature in (0.0, 2.0)]
        results = run(engine, [play([9, 8], own) for own in params])
        assert all(token_id < 259 for result in results for token_id in result.output_token_ids)
    finally:
        with torch.inference_mode():
            head[259:] = saved


def test_c10_an_end_token_inside_an_accepted_draft_ends_the_text(make_engine: MakeEngine) -> None:
    """Nothing after it is sent or counted; with ignore_eos the text goes on to max_tokens."""
    engine = make_engine()
    for draft_k in (1, 4, 8):
        biased = replace(GREEDY, ignore_eos=False, logit_bias={END: 200.0}, min_tokens=4)
        plain = one(engine, [5], biased)
        assert plain.output_token_ids[4:] == (END,)
        assert plain.finish_reason is FinishReason.STOP
        text = (*plain.output_token_ids, 7, 7, 7, 7)
        drafted = one(engine, [5], biased, chain_after(text, draft_k))
        assert (drafted.output_token_ids, drafted.finish_reason) == (plain.output_token_ids, FinishReason.STOP)
        ignoring = replace(biased, ignore_eos=True)
        whole = one(engine, [5], ignoring)
        assert whole.output_token_ids == (END,) * 12
        assert one(engine, [5], ignoring, chain_after((END,) * 20, draft_k)).output_token_ids == (END,) * 12


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_c11_max_tokens_is_exact(make_engine: MakeEngine, max_tokens: int) -> None:
    """max_tokens 1 to 9 with K = 8: exactly so many, end reason length, counts that agree."""
    engine = make_engine()
    text = one(engine, [5], replace(GREEDY, max_tokens=20)).output_token_ids
    result = one(engine, [5], replace(GREEDY, max_tokens=max_tokens, logprobs=0), chain_after(text, 8))
    assert result.output_token_ids == text[:max_tokens]
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.logprobs) == max_tokens
    for answer, draft in zip(result.verifications, result.drafts, strict=True):
        assert answer.num_accepted <= min(len(draft), len(answer.output_token_ids))


def test_c11_the_context_limit_ends_the_text(make_engine: MakeEngine) -> None:
    """Prompt + output never exceed the context, whatever the draft's length; the same text as without drafts."""
    engine = make_engine(max_model_len=20)
    long = replace(GREEDY, max_tokens=100)
    plain = one(engine, list(range(9)), long)
    assert len(plain.output_token_ids) == 11
    assert plain.finish_reason is FinishReason.LENGTH
    drafted = one(engine, list(range(9)), long, chain_after((*plain.output_token_ids, *range(20)), 8))
    assert drafted.output_token_ids == plain.output_token_ids
    refused = one(engine, list(range(21)), long)
    assert refused.failure is not None
    assert refused.failure.error is InvalidRequest
    assert "21 tokens" in refused.failure.message
    full = one(engine, list(range(20)), long)
    assert (full.output_token_ids, full.finish_reason) == ((), FinishReason.LENGTH)


def test_c11_nodes_that_cannot_matter_take_no_row() -> None:
    """Of a tree only the nodes after which a token may still come are fed: depth below max_new - 1."""
    draft = Draft((1, 2, 3, 4, 5), (-1, 0, -1, 1, 2))
    works = [PendingWork.verification(draft, max_new, 0, 0) for max_new in (1, 2, 3, 4)]
    assert [work.fed_nodes for work in works] == [(), (0, 2), (0, 1, 2, 4), (0, 1, 2, 3, 4)]
    assert [work.num_fed_levels for work in works] == [0, 1, 2, 3]


def test_c12_min_tokens_masks_at_every_draft_position(make_engine: MakeEngine) -> None:
    """A stop id and the end token, both favoured, do not come before min_tokens, drafted or not."""
    engine = make_engine()
    params = replace(
        GREEDY, ignore_eos=False, min_tokens=6, stop_token_ids=frozenset({9}), logit_bias={END: 90.0, 9: 80.0}
    )
    plain = one(engine, [5], params)
    assert plain.output_token_ids[6:] == (END,)
    assert not {END, 9} & set(plain.output_token_ids[:6])
    early = (plain.output_token_ids[0], END, 9, END, 9, END, 9)
    for text in (early, (*plain.output_token_ids, 9)):
        for k in (1, 5, 8):
            assert one(engine, [5], params, chain_after(text, k)).output_token_ids == plain.output_token_ids


def test_c16_logprobs_belong_to_their_tokens(make_engine: MakeEngine) -> None:
    """One entry per token, within 1e-3 of the run without drafts, of raw logits though bias decides the token."""
    engine = make_engine()
    for temperature in (0.0, 1.0):
        params = replace(GREEDY, temperature=temperature, seed=4, logprobs=3, logit_bias={7: 60.0}, presence_penalty=70)
        plain = one(engine, [5], params)
        text = plain.output_token_ids
        drafted = one(engine, [5], params, chain_after((*text[:5], 0, *text[6:]), 4))
        assert drafted.output_token_ids == text
        assert len(drafted.logprobs) == len(text)
        for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert ours.logprob < 0
            assert len(ours.top) == 3
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {7: 40.0, 8: 38.0}, "frequency_penalty": 1.5},
        {"temperature": 1.0, "min_p": 0.3, "seed": 3},
        {"allowed_token_ids": frozenset({1, 2, 3, 5, 8})},
        {"temperature": 1.0, "top_k": 2, "seed": 5, "repetition_penalty": 1.8},
    ],
)
def test_c17_parameters_act_at_every_draft_position(make_engine: MakeEngine, changes: dict[str, object]) -> None:
    """A draft that ignores bias, min_p or the allowed ids is rejected where they decide; one that knows is accepted."""
    engine = make_engine()
    params = replace(GREEDY, **changes)  # type: ignore[arg-type]
    plain = one(engine, [5], params)
    bare = one(engine, [5], replace(GREEDY, seed=params.seed))
    assert plain.output_token_ids != bare.output_token_ids
    for text in (plain.output_token_ids, bare.output_token_ids):
        assert one(engine, [5], params, chain_after(text, 8)).output_token_ids == plain.output_token_ids


def test_c18_temperatures_share_one_greedy_limit(make_engine: MakeEngine) -> None:
    """Below 1e-5 greedy, from there on sampled; nothing overflows; the same with drafts."""
    engine = make_engine()
    texts = {}
    for temperature in (0.0, 1e-9, 1e-6, 9.99e-6, 1e-5, 1e-3, 2.0, 1e6):
        params = replace(GREEDY, temperature=temperature, seed=11)
        texts[temperature] = one(engine, [5], params).output_token_ids
        drafted = one(engine, [5], params, chain_after(texts[temperature], 5))
        assert drafted.output_token_ids == texts[temperature]
    assert len({texts[temperature] for temperature in (0.0, 1e-9, 1e-6, 9.99e-6)}) == 1
    assert texts[2.0] != texts[0.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 2.0},
        {"top_p": math.nan},
        {"min_p": -0.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"logit_bias": {3: math.nan}},
        {"max_tokens": 0},
        {"logprobs": 10**9},
    ],
)
def test_c19_absurd_parameters_are_refused(make_engine: MakeEngine, changes: dict[str, object]) -> None:
    """The router refuses them first; should one come through, it fails alone and the next request is served."""
    engine = make_engine()
    bad = one(engine, [5], replace(GREEDY, **changes))  # type: ignore[arg-type]
    assert bad.failure is not None
    assert bad.failure.error is InvalidRequest
    assert len(one(engine, [5], GREEDY).output_token_ids) == 12


@pytest.mark.parametrize("changes", [{"top_k": 9_999_999}, {"top_p": 0.0}, {"logit_bias": {10**7: 5.0}}])
def test_c19_extreme_parameters_have_a_meaning(make_engine: MakeEngine, changes: dict[str, object]) -> None:
    """Above the vocabulary: no limit; top_p 0: one token; a bias on no id: nothing."""
    engine = make_engine()
    assert len(one(engine, [5], replace(GREEDY, temperature=1.0, **changes)).output_token_ids) == 12  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[], [259], [5, 2**31]])
def test_c23_empty_and_foreign_prompts_are_refused(make_engine: MakeEngine, prompt: list[int]) -> None:
    """No tokens, or ids outside the vocabulary: INVALID, and the next request is served."""
    engine = make_engine()
    bad = one(engine, prompt, GREEDY)
    assert bad.failure is not None
    assert bad.failure.error is InvalidRequest
    assert len(one(engine, [5], GREEDY).output_token_ids) == 12


def test_a_request_that_is_over_opens_with_its_end(make_engine: MakeEngine) -> None:
    """Opened anew with all its tokens, a request is answered with its end reason and nothing more."""
    engine = make_engine()
    over = one(engine, [5], GREEDY, committed=range(12))
    assert (over.output_token_ids, over.finish_reason) == (tuple(range(12)), FinishReason.LENGTH)
    stopped = one(engine, [5], replace(GREEDY, ignore_eos=False), committed=(1, END))
    assert (stopped.output_token_ids, stopped.finish_reason) == ((1, END), FinishReason.STOP)


def test_c24_the_end_of_a_stream_frees_everything(make_engine: MakeEngine) -> None:
    """Sessions in every state (waiting, in prefill, idle, with a draft) are gone after one step."""
    engine = make_engine(max_num_seqs=3, prefill_chunk_tokens=8)
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    engine.submit(stream, [Open(number, "r", tuple([7] * (2 + number * 10)), GREEDY) for number in range(1, 6)])
    for _ in range(4):
        engine.step()
    assert engine.runner.pool.used_tokens > 0
    assert engine.serving.scheduler.num_waiting > 0
    engine.disconnect(stream)
    engine.step()
    assert engine.stats.num_sessions == 0
    assert engine.runner.pool.used_tokens == 0
    assert not stream.sessions


def test_c24_finish_and_abort_free_the_session(make_engine: MakeEngine) -> None:
    """Both are silent, and neither is an error for a session that has ended by itself."""
    engine = make_engine()
    answers = talk(engine, Open(1, "r", (5,), GREEDY), Finish(1), Open(2, "r", (5,), GREEDY), Abort(2), Abort(2))
    assert [type(answer) for answer in answers] == [Opened, Opened]
    assert engine.stats.num_sessions == 0


def test_a_long_prompt_does_not_starve_the_others(make_engine: MakeEngine) -> None:
    """While 700 tokens are prefilled in chunks of 16, a running request is answered in every step."""
    engine = make_engine(prefill_chunk_tokens=16)
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    long = replace(GREEDY, max_tokens=100)
    engine.submit(stream, [Open(1, "short", (5,), long)])
    engine.step()
    engine.submit(stream, [Open(2, "long", (5,) * 700, long)])
    length, rounds = 2, 0
    while not any(isinstance(answer, Opened) and answer.session_id == 2 for answer in answers):
        rounds += 1
        engine.submit(stream, [Verify(1, rounds, length, Draft())])
        before = len(answers)
        engine.step()
        assert any(answer.session_id == 1 for answer in answers[before:])
        length += 1
    assert rounds == 44  # 700 tokens in chunks of 16
    engine.disconnect(stream)


def test_a_poisoned_request_fails_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of NaN ends its own session with POISONED; its batch-mates' text is untouched."""
    engine = make_engine()
    expected = [one(engine, [number], GREEDY).output_token_ids for number in range(1, 5)]
    monkeypatch.setattr(faults, "_active", faults.parse_faults("verifier.logits=nan@poison"))
    plays = [play([number], GREEDY, request_id="poison" if number == 2 else "good") for number in range(1, 5)]
    results = run(engine, plays)
    assert results[1].failure is not None
    assert results[1].failure.error is RequestPoisoned
    for number in (0, 2, 3):
        assert results[number].output_token_ids == expected[number]


def test_a_request_that_breaks_the_forward_pass_fails_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is repeated in halves until the guilty one is alone; its answer names no content."""
    engine = make_engine()
    expected = [one(engine, [number], GREEDY).output_token_ids for number in range(1, 7)]
    monkeypatch.setattr(faults, "_active", faults.parse_faults("verifier.forward=raise@bad"))
    plays = [play([number], GREEDY, request_id="bad" if number == 4 else "good") for number in range(1, 7)]
    results = run(engine, plays)
    assert results[3].failure is not None
    assert results[3].failure.error is PeerError
    assert results[3].failure.message == "internal error (RuntimeError)"
    for number in (0, 1, 2, 4, 5):
        assert results[number].output_token_ids == expected[number]


class LittleMemory:
    """A runner on a device on which a pass of more than `most` tokens finds no memory, nor one beside a failed one."""

    def __init__(self, runner: ModelRunner, most: int) -> None:
        self._runner = runner
        self._most = most
        self._failed: weakref.ref[Tensor] | None = None

    def forward(self, inputs: Sequence[SequenceInput], progress: Callable[[], None]) -> list[Tensor]:
        assert self._failed is None or self._failed() is None, "the pass that failed still holds its memory"
        activations = torch.zeros(1)
        if sum(len(entry.token_ids) for entry in inputs) > self._most:
            self._failed = weakref.ref(activations)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._runner.forward(inputs, progress)


def test_out_of_memory_makes_steps_smaller(make_engine: MakeEngine) -> None:
    """Batches and prefill chunks shrink until they fit, and what failed is let go before; texts stay the same."""
    engine = make_engine()
    jobs = [((number, *range(50)), number) for number in range(1, 5)]
    expected = [one(engine, prompt, GREEDY).output_token_ids for prompt, _ in jobs]
    engine.serving.steps._runner = LittleMemory(engine.runner, 10)  # type: ignore[assignment]  # all that a step calls
    drafts = [chain_after(text, 4) for text in expected]
    results = run(engine, [play(prompt, GREEDY, draft) for (prompt, _), draft in zip(jobs, drafts, strict=True)])
    assert [result.output_token_ids for result in results] == expected


@pytest.mark.parametrize("draft", [Draft.chain(tuple(range(30))), Draft(tuple(range(30)), (ROOT,) * 30)])
def test_a_draft_without_memory_is_left_out(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, draft: Draft
) -> None:
    """A draft decides nothing: where it finds no memory, the round is plain decoding. Without room for one token the
    request fails, and only that one."""
    engine = make_engine()
    params = replace(GREEDY, max_tokens=50)
    expected = [one(engine, [number], params).output_token_ids for number in (5, 6)]
    monkeypatch.setattr(faults, "_active", faults.parse_faults("verifier.forward=memory:1@tight"))
    results = run(engine, [play([5], params, lambda _: draft, request_id="tight"), play([6], params, lambda _: draft)])
    assert [result.output_token_ids for result in results] == expected
    assert all(verification.num_accepted == 0 for verification in results[0].verifications)
    monkeypatch.setattr(faults, "_active", faults.parse_faults("verifier.forward=memory:0@tight"))
    results = run(engine, [play([5], params, request_id="tight"), play([6], params, lambda _: draft)])
    assert results[0].failure is not None
    assert results[0].failure.error is OutOfMemory
    assert results[1].output_token_ids == expected[1]


def test_overload_is_refused_at_once(make_engine: MakeEngine) -> None:
    """Past the bounds on sessions or waiting tokens an opening is refused by `submit` itself, before any step."""
    engine = make_engine(max_num_seqs=1, max_waiting_seqs=2, max_waiting_tokens=1000)
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    engine.submit(stream, [Open(1, "r", (5,) * 900, GREEDY), Open(2, "r", (5,) * 200, GREEDY)])
    assert [(answer.session_id, answer.error) for answer in answers] == [(2, NoCapacity)]  # type: ignore[union-attr]
    engine.submit(stream, [Open(number, "r", (5,), GREEDY) for number in (3, 4, 5)])
    assert [answer.session_id for answer in answers] == [2, 5]
    while engine.step():
        pass
    # The first is answered and idle; its tokens wait no more.
    assert any(isinstance(answer, Opened) for answer in answers)
    engine.submit(stream, [Finish(1)])
    engine.step()
    engine.submit(stream, [Open(6, "r", (5,) * 990, GREEDY)])
    assert answers[-1].session_id != 6
    engine.disconnect(stream)


def test_a_draining_engine_opens_nothing_and_finishes_what_runs(make_engine: MakeEngine) -> None:
    """After `drain` an opening gets DRAINING; a running session goes on to its end."""
    engine = make_engine()
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    engine.submit(stream, [Open(1, "r", (5,), replace(GREEDY, max_tokens=2))])
    engine.step()
    engine.drain()
    engine.submit(stream, [Open(2, "r", (5,), GREEDY), Verify(1, 1, 2, Draft())])
    engine.step()
    assert answers[1] == Failed(2, Draining, "this verifier is going away")
    assert isinstance(answers[2], Verified)
    assert answers[2].verification.finish_reason is FinishReason.LENGTH
    engine.disconnect(stream)


def test_an_idle_session_is_freed_when_its_lease_is_over(make_engine: MakeEngine) -> None:
    """A peer that forgets a session loses it, and is told."""
    engine = make_engine(session_idle_limit_s=0.001)
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    engine.submit(stream, [Open(1, "r", (5,), GREEDY)])
    for _ in range(10_000):
        engine.step()
        if len(answers) == 2:
            break
    assert isinstance(answers[1], Failed)
    assert answers[1].error is UnknownSession
    assert engine.runner.pool.used_tokens == 0
    engine.disconnect(stream)


def test_a_verify_before_the_answer_to_the_last_ends_the_session(make_engine: MakeEngine) -> None:
    """A peer that does not wait cannot know the base length: INVALID."""
    engine = make_engine()
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    engine.submit(stream, [Open(1, "r", (5,), GREEDY), Verify(1, 1, 2, Draft())])
    engine.step()
    assert [type(answer) for answer in answers] == [Failed]
    engine.disconnect(stream)


def test_top_candidates_are_the_likeliest_ids_per_committed_token(make_engine: MakeEngine) -> None:
    """As many rows as output tokens, greedy tokens first in theirs."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    answers = talk(
        engine, Open(1, "r", (5,), GREEDY, num_top_candidates=4), Verify(1, 1, 2, Draft.chain((*text[1:3], 255)))
    )
    rows = [row for answer in answers for row in answer.verification.top_candidates]  # type: ignore[union-attr]
    assert [row[0] for row in rows] == list(text[:4])
    assert all(len(set(row)) == 4 for row in rows)


def test_hints_of_a_request_are_its_own_whoever_shares_the_step(make_engine: MakeEngine) -> None:
    """Requests that want different numbers of hints, or none, or draw with noise, get what each gets alone."""
    engine = make_engine()
    noisy = SamplingParams(temperature=0.9, seed=3)
    asked = [(5, GREEDY, 4), (6, noisy, 2), (7, GREEDY, 0), (8, noisy, 7)]

    def hints(numbers: Sequence[int]) -> dict[int, tuple[tuple[int, ...], ...]]:
        answers: list[Answer] = []
        stream = engine.connect(answers.extend)
        for number in numbers:
            first, params, width = asked[number]
            engine.submit(stream, [Open(number + 1, f"r{number}", (first,), params, num_top_candidates=width)])
        while engine.step():
            pass
        engine.disconnect(stream)
        engine.step()
        opened = [answer for answer in answers if isinstance(answer, Opened)]
        assert len(opened) == len(numbers)
        return {answer.session_id - 1: answer.verification.top_candidates for answer in opened}

    alone = {number: rows for one_of in range(len(asked)) for number, rows in hints([one_of]).items()}
    assert [len(rows[0]) if rows else 0 for _, rows in sorted(alone.items())] == [4, 2, 0, 7]
    assert hints(range(len(asked))) == alone


def test_accepted_siblings_are_walked_through(make_engine: MakeEngine) -> None:
    """A tree whose true path is never the first child: all accepted, one forward pass."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    wrong = [(token_id + 1) % 256 for token_id in text]
    draft = Draft((wrong[1], text[1], wrong[2], text[2], text[3]), (ROOT, ROOT, 1, 1, 3))
    answers = talk(engine, Open(1, "r", (5,), GREEDY), Verify(1, 1, 2, draft))
    assert isinstance(answers[1], Verified)
    assert answers[1].verification.num_accepted == 3
    assert answers[1].verification.output_token_ids == text[1:5]
