"""Batch-invariant mode: batched = alone = chunked = prefix hit = preempted = opened anew, bit by bit."""

from __future__ import annotations

import random

import pytest

from moot.core.types import SamplingParams
from tests.services.verifier.verifier_driver import MakeEngine, Result, Script, make_suite, play, run

DTYPES = ["bfloat16", "float32"]


def params_for(number: int) -> SamplingParams:
    """`logprobs` shows the bits: ids alone would hide a difference that flips no token."""
    temperature = (0.0, 1.0)[number % 2]
    return SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=number, logprobs=4)


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    shared = [draw.randrange(256) for _ in range(150)]
    return [shared[:130], [*shared, 1, 2], [9], shared[:64], shared[:65], [draw.randrange(256) for _ in range(700)]]


def bits(result: Result) -> tuple[object, ...]:
    assert result.failure is None
    return result.output_token_ids, [(one.logprob, one.rank, one.top) for one in result.logprobs]


def alone(make_engine: MakeEngine, dtype: str) -> list[Result]:
    """Each request alone, its prompt in one chunk, nothing shared."""
    engine = make_engine(dtype=dtype, batch_invariant=True, prefix_cache_tokens=0, prefill_chunk_tokens=900)
    jobs = list(enumerate(prompts()))
    return run(engine, [play(prompt, params_for(number)) for number, prompt in jobs], at_once=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_chunks_and_drafts_change_no_bit(make_engine: MakeEngine, dtype: str) -> None:
    """Together, in chunks of 7, with drafts that are chains and trees: the same bits as alone."""
    expected = alone(make_engine, dtype)
    engine = make_engine(dtype=dtype, batch_invariant=True, prefix_cache_tokens=0, prefill_chunk_tokens=7)
    plays = []
    for number, prompt in enumerate(prompts()):
        script = Script(expected[number].output_token_ids, 7, random.Random(number))
        plays += [play(prompt, params_for(number)), play(prompt, params_for(number), script)]
    results = run(engine, plays, at_once=12)
    for number, result in enumerate(results):
        assert bits(result) == bits(expected[number // 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_hits_change_no_bit(make_engine: MakeEngine, dtype: str) -> None:
    """The second of two equal prompts is answered from shared blocks, says so, and has the same bits."""
    expected = alone(make_engine, dtype)
    engine = make_engine(dtype=dtype, batch_invariant=True, prefix_block_tokens=32, prefill_chunk_tokens=48)
    jobs = list(enumerate(prompts()))
    for turn in range(2):
        results = run(engine, [play(prompt, params_for(number)) for number, prompt in jobs], at_once=1)
        for (_, prompt), result, wanted in zip(jobs, results, expected, strict=True):
            assert bits(result) == bits(wanted)
            cached = result.verifications[0].num_cached_tokens
            assert cached <= len(prompt) - 1
            if turn:
                assert cached == (len(prompt) - 1) // 32 * 32
    assert results[1].verifications[0].num_cached_tokens == 128
    # Another salt shares nothing.
    (salted,) = run(engine, [play(prompts()[1], params_for(1), cache_salt="other")])
    assert salted.verifications[0].num_cached_tokens == 0
    assert bits(salted) == bits(expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption_changes_no_bit(make_engine: MakeEngine, dtype: str) -> None:
    """With two pages for six requests that grow, the youngest lose their KV and are filled anew: the same bits."""
    draw = random.Random(3)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=4)
    texts = [[draw.randrange(256) for _ in range(490 + number)] for number in range(3)]
    wide = make_engine(dtype=dtype, batch_invariant=True, prefix_cache_tokens=0)
    expected = run(wide, [play(text, long) for text in texts], at_once=1)
    tight = make_engine(dtype=dtype, batch_invariant=True, pages=4, prefix_cache_tokens=0)
    preempted = []
    rearrange = tight.serving.scheduler.rearrange

    def watched() -> object:
        changes = rearrange()
        preempted.extend(changes.preempted)
        return changes

    tight.serving.scheduler.rearrange = watched  # type: ignore[method-assign]
    scripts = [Script(one.output_token_ids, 5, random.Random(1)) for one in expected]
    results = run(tight, [play(text, long, script) for text, script in zip(texts, scripts, strict=True)])
    assert preempted
    assert [bits(one) for one in results] == [bits(one) for one in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_moved_request_goes_on_with_the_same_bits(make_engine: MakeEngine, dtype: str) -> None:
    """Opened anew on another engine with its committed tokens after any number of them, a request ends the same."""
    expected = alone(make_engine, dtype)
    other = make_engine(dtype=dtype, batch_invariant=True, prefill_chunk_tokens=33)
    for number, prompt in enumerate(prompts()):
        whole = expected[number]
        for committed in (1, 5, 23):
            start = whole.output_token_ids[:committed]
            (rest,) = run(other, [play(prompt, params_for(number), committed=start)])
            assert rest.output_token_ids == whole.output_token_ids
            assert [one.logprob for one in rest.logprobs] == [one.logprob for one in whole.logprobs[committed:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_draft_leaves_the_text_unchanged_in_low_precision(make_engine: MakeEngine, dtype: str) -> None:
    """Path equality in the numbers that are served: drawn cases, plain ones alone and drafted ones in company."""
    engine = make_engine(dtype=dtype, batch_invariant=True, prefill_chunk_tokens=16)
    suite = make_suite(engine, range(40_000, 40_060))
    wrong, _ = suite.compare(engine, at_once=13)
    assert wrong == []
