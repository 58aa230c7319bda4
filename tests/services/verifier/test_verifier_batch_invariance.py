"""Batch-invariant mode: batched = alone = chunked = prefix hit = preempted = opened anew, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moot.core.types import SamplingParams
from moot.model.loading.load import LoadedModel
from services.verifier.engine import Engine
from tests.services.verifier.verifier_driver import MakeEngine, Play, Result, Script, engine_on, play, preempted_by, run

DRAW = random.Random(7)
SHARED = [DRAW.randrange(256) for _ in range(150)]
PROMPTS = [SHARED[:130], [*SHARED, 1, 2], [9], SHARED[:64], SHARED[:65], [DRAW.randrange(256) for _ in range(700)]]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def invariant(make_engine: MakeEngine, dtype: str) -> Callable[..., Engine]:
    """Engines in this mode, without a prefix cache unless they are given one."""

    def make(prefix_cache_tokens: int = 0, **options: Any) -> Engine:
        return make_engine(dtype=dtype, batch_invariant=True, prefix_cache_tokens=prefix_cache_tokens, **options)

    return make


@pytest.fixture(scope="module")
def alone(loaded_model: Callable[..., LoadedModel], dtype: str) -> list[Result]:
    """Each request alone, its prompt in one chunk, nothing shared."""
    options = {"batch_invariant": True, "prefix_cache_tokens": 0, "prefill_chunk_tokens": 900}
    engine = engine_on(loaded_model(dtype=dtype), **options)  # type: ignore[arg-type]
    return run(engine, map(request, range(len(PROMPTS))), at_once=1)


def request(number: int, *args: Any, **options: Any) -> Play:
    """`logprobs` shows the bits: ids alone would hide a difference that flips no token."""
    temperature = (0.0, 1.0)[number % 2]
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=number, logprobs=4)
    return play(PROMPTS[number], params, *args, **options)


def bits(results: Sequence[Result]) -> list[tuple[object, ...]]:
    assert not any(result.failure for result in results)
    return [(result.output_token_ids, result.logprobs) for result in results]


def test_company_chunks_and_drafts_change_no_bit(invariant: Callable[..., Engine], alone: list[Result]) -> None:
    """C04: together, in chunks of 7, with drafts that are chains and trees: the same bits as alone."""
    plays = []
    for number, expected in enumerate(alone):
        script = Script(expected.output_token_ids, 7, random.Random(number))
        plays += [request(number), request(number, script)]
    results = run(invariant(prefill_chunk_tokens=7), plays, at_once=12)
    assert bits(results[::2]) == bits(results[1::2]) == bits(alone)


def test_prefix_hits_change_no_bit(invariant: Callable[..., Engine], alone: list[Result]) -> None:
    """The second of two equal prompts is answered from shared blocks, says so, and has the same bits."""
    engine = invariant(prefix_cache_tokens=16_384, prefix_block_tokens=32, prefill_chunk_tokens=48)
    for turn in range(2):
        results = run(engine, map(request, range(len(PROMPTS))), at_once=1)
        assert bits(results) == bits(alone)
        cached = [result.verifications[0].num_cached_tokens for result in results]
        whole = [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]
        assert cached == whole if turn else all(one <= most for one, most in zip(cached, whole, strict=True))
    assert cached[1] == 128


def test_preemption_changes_no_bit(invariant: Callable[..., Engine]) -> None:
    """With four pages for three requests that grow, the youngest lose their KV and are filled anew: the same bits."""
    draw = random.Random(3)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=4)
    texts = [[draw.randrange(256) for _ in range(490 + number)] for number in range(3)]
    expected = run(invariant(), [play(text, long) for text in texts], at_once=1)
    tight = invariant(pages=4)
    preempted = preempted_by(tight)
    scripts = [Script(one.output_token_ids, 5, random.Random(1)) for one in expected]
    results = run(tight, [play(text, long, script) for text, script in zip(texts, scripts, strict=True)])
    assert preempted
    assert bits(results) == bits(expected)


def test_a_moved_request_goes_on_with_the_same_bits(invariant: Callable[..., Engine], alone: list[Result]) -> None:
    """Opened anew on another engine with its committed tokens after any number of them, a request ends the same."""
    other = invariant(prefix_cache_tokens=16_384, prefill_chunk_tokens=33)
    for number, whole in enumerate(alone):
        for committed in (1, 5, 23):
            (rest,) = run(other, [request(number, committed=whole.output_token_ids[:committed])])
            assert bits([rest]) == [(whole.output_token_ids, whole.logprobs[committed:])]
