"""The tensor sampler equals the reference id by id, ties and edges included, and never looks at padding."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core import sampling as reference
from moot.core.errors import RequestPoisoned
from moot.core.types import SamplingParams
from moot.model.sampling.batch import CANDIDATES, BatchSampler, RowSpec
from moot.model.sampling.logits import indices_where, top_k_indices, top_p_indices
from moot.model.sampling.sampler import EXACT_AT_ONCE, History, Sampler

LARGE = 3000
assert LARGE > 4 * EXACT_AT_ONCE, "the large rows must go through the screen"
assert LARGE > 2 * CANDIDATES, "the large rows must have tokens that are no candidates"

END = 1


def bfloat16_like(seed: int, vocab_size: int, spread: float) -> torch.Tensor:
    """Normal logits rounded to bfloat16, so that a row of some size is full of equal values; float32."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab_size, generator=generator) * spread).to(torch.bfloat16).float()


@st.composite
def params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    token_ids = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-9, 9.9e-6, 1e-5, 1e-3, 0.3, 0.7, 1.0, 1.3, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, 50, vocab_size, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-12, 0.1, 0.25, 0.5, 2 / 3, 0.9, 0.95, 0.999999, 1 - 2**-53])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.1, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.1, -1.0])),
        logit_bias=draw(st.dictionaries(st.integers(-2, vocab_size + 2), st.sampled_from([-100.0, -1.0, 0.5, 100.0]))),
        allowed_token_ids=draw(st.none() | st.frozensets(st.integers(0, vocab_size + 2), min_size=1)),
        min_tokens=draw(st.integers(0, 5)),
        stop_token_ids=draw(st.frozensets(token_ids, max_size=2)),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def outcome(choose: Callable[..., int], *arguments: Any) -> int | None:
    try:
        return choose(*arguments)
    except RequestPoisoned:
        return None


def expected(row: torch.Tensor, vocab_size: int, spec: RowSpec, ids: list[list[int]]) -> int | None:
    """What the reference says of `row` (padded beyond `vocab_size`); `ids`: prompt, committed output, path."""
    prompt, output, path = ids
    choose = partial(reference.sample_token, end_token_ids=frozenset({END}))
    return outcome(choose, row[:vocab_size].tolist(), spec.params, spec.position, prompt, output + path)


def check(data: st.DataObject, rows: torch.Tensor, vocab_size: int) -> None:
    """The sampler of rows, each by itself, and that of all rows of a step give the reference's ids and errors."""
    sampler = Sampler(vocab_size, frozenset({END}))
    token_lists = st.lists(st.integers(0, min(vocab_size, 20) - 1), max_size=6)
    ids = [[data.draw(token_lists) for _ in range(3)] for _ in rows]
    specs = [
        RowSpec(
            data.draw(params(vocab_size)),
            data.draw(st.integers(0, 10**6)),
            History(prompt, output).with_path(path),
        )
        for prompt, output, path in ids
    ]
    wanted = [expected(row, vocab_size, spec, of_row) for row, spec, of_row in zip(rows, specs, ids, strict=True)]
    assert [drawn.token_id for drawn in BatchSampler(sampler).draw(rows, specs)] == wanted
    for row, spec, token_id in zip(rows, specs, wanted, strict=True):
        assert outcome(sampler.sample, row, spec.params, spec.position, spec.history) == token_id


@settings(max_examples=250)
@given(st.data())
def test_equal_to_the_reference_on_small_rows(data: st.DataObject) -> None:
    """Any parameters, histories and draft paths in one batch, few distinct logits (so ties everywhere)."""
    vocab_size, count = data.draw(st.integers(2, 24)), data.draw(st.integers(1, 5))
    values = st.sampled_from([0.0, 0.5, -0.5, 1.0, 2.0, -30.0, 0.1, 1e30, -3.4e38, -math.inf, math.nan])
    rows = [data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size)) for _ in range(count)]
    padding = [math.nan, math.inf, 1e38][: data.draw(st.integers(0, 3))]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    check(data, torch.tensor([row + padding for row in rows], dtype=dtype), vocab_size)


@settings(max_examples=100)
@given(st.data())
def test_equal_to_the_reference_on_large_rows_with_ties(data: st.DataObject) -> None:
    """More tokens than are screened for and than there are candidates, rounded to bfloat16: pruning changes no id, and
    borders among equal logits are noticed and decided exactly."""
    spreads = data.draw(st.lists(st.sampled_from([0.01, 0.3, 2.0, 8.0]), min_size=1, max_size=3))
    rows = [bfloat16_like(data.draw(st.integers(0, 10**6)), LARGE + 8, spread) for spread in spreads]
    check(data, torch.stack(rows), LARGE)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 9.0])
def test_screening_never_loses_the_winner(spread: float) -> None:
    """Over many positions the few tokens that are computed exactly contain the best of all."""
    row = bfloat16_like(5, LARGE, spread)
    sampler, history, p = Sampler(LARGE, frozenset()), History([]), SamplingParams(seed=11)
    listed = row.tolist()
    for position in range(40):
        assert sampler.sample(row, p, position, history) == reference.sample_token(listed, p, position, [], [])


def test_a_far_token_wins_when_its_noise_is_high() -> None:
    """No token within reach of the noise is pruned: 3000 tokens nine nats down win about a third of the draws."""
    row = torch.full((LARGE,), -9.0)
    row[17] = 0.0
    sampler, history = Sampler(LARGE, frozenset()), History([])
    draws = [sampler.sample(row, SamplingParams(seed=4), position, history) for position in range(1000)]
    far = sum(token_id != 17 for token_id in draws)
    expected = 1000 * (LARGE - 1) * math.exp(-9.0) / (1 + (LARGE - 1) * math.exp(-9.0))
    assert abs(far - expected) < 6 * math.sqrt(expected)


@settings(max_examples=200)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.02, 1.0, 5.0, 20.0]),
    st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.999999999, 1 - 2**-53]),
    st.sampled_from([5, 700, LARGE]),
)
def test_filters_keep_the_very_ids_of_the_reference(seed: int, spread: float, top_p: float, top_k: int) -> None:
    """The whole set is equal, not only the token that happens to be drawn from it."""
    row = bfloat16_like(seed, LARGE, spread).double()
    scaled = row - row.max()
    order = sorted(range(LARGE), key=lambda token_id: (-scaled[token_id].item(), token_id))[:top_k]
    kept = top_k_indices(scaled, top_k)
    assert kept.tolist() == sorted(order)
    expected = sorted(reference.nucleus(order, scaled.tolist(), top_p))
    assert kept[top_p_indices(scaled[kept], top_p, LARGE)].tolist() == expected


def test_narrowing_ends_on_neighbouring_floats_and_masked_tokens() -> None:
    """Values that no middle separates, equal values and -inf end the search for the nucleus, with the right set."""
    pair = [-1.0, math.nextafter(-1.0, -math.inf)]
    values = torch.tensor(pair * 400 + [-math.inf] * 200, dtype=torch.float64)
    order = sorted(range(1000), key=lambda token_id: (-values[token_id].item(), token_id))
    for top_p in (0.25, 0.5, 0.75, 0.9999999999, 1 - 2**-53):
        expected = sorted(reference.nucleus(order, values.tolist(), top_p))
        assert top_p_indices(values, top_p, 1000).tolist() == expected
    assert top_p_indices(torch.zeros(1000, dtype=torch.float64), 0.5, 1000).tolist() == list(range(500))


def test_argmax_ties_take_the_lowest_id_in_every_row() -> None:
    """C01: one tie rule for all rows of a batch, wherever the ties lie; both paths agree on it."""
    sampler, history = Sampler(LARGE, frozenset()), History([])
    rows = torch.stack([bfloat16_like(seed, LARGE + 3, 0.5) for seed in range(12)])
    rows[3, [2000, 70, 2999]] = 50.0
    rows[4, :] = 1.0
    rows[5, LARGE:] = 99.0
    got = sampler.greedy_rows(rows)
    assert got == [max(range(LARGE), key=lambda x, row=row: (row[x], -x)) for row in (r[:LARGE].tolist() for r in rows)]
    assert got[3:5] == [70, 0]
    assert sampler.greedy_rows(rows.to(torch.bfloat16)) == got, "every dtype, thus every route, has the rule"
    assert got == [sampler.sample(row, SamplingParams(temperature=0.0), 0, history) for row in rows]


def test_a_poisoned_row_harms_no_other() -> None:
    """NaN, infinity or nothing finite in one row: None there, the right ids elsewhere; `sample` raises for it alone."""
    rows = torch.tensor([[0.0, 2.0, 1.0], [0.0, math.nan, 1.0], [1.0, math.inf, 0.0], [-math.inf] * 3, [3.0, 1.0, 2.0]])
    sampler = Sampler(3, frozenset())
    assert sampler.greedy_rows(rows) == [1, None, None, None, 0]
    assert sampler.greedy_rows(rows.to(torch.bfloat16)) == [1, None, None, None, 0]
    assert sampler.draft_tokens(rows, [SamplingParams()] * 5, range(5), [None] * 5)[1:4] == [None] * 3
    for row in rows[1:4]:
        for temperature in (0.0, 1.0):
            with pytest.raises(RequestPoisoned):
                sampler.sample(row, SamplingParams(temperature=temperature), 0, History([]))
        with pytest.raises(RequestPoisoned):
            sampler.logprobs(row, 0, 1)
    assert sampler.greedy_rows(rows[:0]) == []


def test_padding_is_never_read() -> None:
    """C07: ids at or above the tokenizer's vocabulary cannot come out, be listed, or poison a row."""
    row = torch.tensor([0.0, 1.0, 1e30, math.nan])
    sampler, history = Sampler(2, frozenset()), History([])
    assert {sampler.sample(row, SamplingParams(seed=seed), 0, history) for seed in range(50)} == {0, 1}
    assert sampler.greedy_rows(row[None]) == [1]
    assert [token_id for token_id, _ in sampler.logprobs(row, 0, 9).top] == [1, 0]
    only_padding = SamplingParams(allowed_token_ids=frozenset({2, 3}))
    with pytest.raises(RequestPoisoned):
        sampler.sample(row, only_padding, 0, history)


def test_needs_row_is_false_only_where_greedy_rows_is_right() -> None:
    """The fast path is taken exactly where nothing but the highest raw logit decides."""
    sampler = Sampler(8, frozenset({END}))
    greedy = SamplingParams(temperature=1e-9)
    assert not sampler.needs_row(greedy, 0)
    assert not sampler.needs_row(replace(greedy, top_k=3, top_p=0.5, min_p=0.2), 0)
    assert not sampler.needs_row(replace(greedy, min_tokens=3), 3)
    for changed in (
        {"temperature": 1e-5},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": frozenset({1})},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 3},
    ):
        assert sampler.needs_row(replace(greedy, **changed), 2), changed


def test_end_is_masked_on_the_path_before_min_tokens() -> None:
    """C12: draft tokens before a position count towards min_tokens, there and not before."""
    sampler = Sampler(3, frozenset({END}))
    row, p = torch.tensor([0.0, 9.0, 1.0]), SamplingParams(temperature=0.0, min_tokens=4)
    history = History([0], [2, 2])
    got = [sampler.sample(row, p, 3 + n, history.with_path([2] * n)) for n in range(4)]
    assert got == [2, 2, END, END]


def test_penalties_see_the_path_and_nothing_stays_of_it() -> None:
    """Penalties are computed on the branch of the position, and a rejected branch leaves no trace."""
    sampler = Sampler(3, frozenset())
    row, p = torch.tensor([2.0, 1.9, 0.0]), SamplingParams(temperature=0.0, presence_penalty=0.5)
    history = History([0])
    assert sampler.sample(row, p, 1, history) == 0
    assert sampler.sample(row, p, 2, history.with_path([0])) == 1
    assert sampler.sample(row, p, 1, history) == 0


def test_rows_are_left_as_they_were() -> None:
    """Logits and logprobs of a row can be asked for after sampling: nothing is changed in place."""
    for dtype in (torch.float32, torch.float64):
        row = bfloat16_like(1, 64, 1.0).to(dtype)
        before = row.clone()
        p = SamplingParams(
            repetition_penalty=1.3,
            logit_bias={3: 1.0},
            min_tokens=5,
            top_k=20,
            top_p=0.9,
            allowed_token_ids=frozenset(range(50)),
        )
        Sampler(64, frozenset({END})).sample(row, p, 0, History([1, 2]))
        assert torch.equal(row, before)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 199), st.integers(0, 8))
def test_logprobs_equal_the_reference(seed: int, token_id: int, num_top: int) -> None:
    """C16: log-probabilities, rank and alternatives of the raw row, ties by lower id."""
    row = bfloat16_like(seed, 203, 1.0)
    got = Sampler(200, frozenset()).logprobs(row, token_id, num_top)
    expected = reference.token_logprobs(row[:200].tolist(), token_id, num_top)
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-9)
    assert got.rank == expected.rank
    assert [x for x, _ in got.top] == [x for x, _ in expected.top]
    assert [v for _, v in got.top] == pytest.approx([v for _, v in expected.top], abs=1e-9)


def test_coupled_draft_is_the_target_s_token_on_equal_logits() -> None:
    """A drafter with the target's own logits always agrees: same rule, same noise. Batch and single calls agree."""
    rows = torch.stack([bfloat16_like(seed, LARGE, 2.0) for seed in range(6)])
    sampler = Sampler(LARGE, frozenset({END}))
    every = [SamplingParams(seed=s, temperature=t, top_p=0.95) for s, t in enumerate([0.0, 0.5, 1.0, 1.0, 2.0, 0.0])]
    histories = [History([1, 2, 3], [4, 5]) for _ in rows]
    every[5] = replace(every[5], repetition_penalty=1.5, min_tokens=9)
    tokens = [sampler.sample(*arguments) for arguments in zip(rows, every, range(6), histories, strict=True)]
    assert sampler.draft_tokens(rows, every, range(6), histories) == tokens
    assert sampler.draft_tokens(rows, every, range(6), [None] * 6)[:5] == tokens[:5]
    assert sampler.draft_token(rows[2], every[2], 2) == tokens[2]


def test_coupled_drafts_agree_more_often_than_greedy_ones() -> None:
    """At temperature 1 a noisy copy of the target agrees with it far more often by coupling than by argmax."""
    target = bfloat16_like(1, 200, 1.5)
    copy = target + bfloat16_like(2, 200, 0.3)
    sampler, history = Sampler(200, frozenset()), History([])
    tokens = [sampler.sample(target, SamplingParams(seed=6), t, history) for t in range(400)]
    coupled = sum(sampler.draft_token(copy, SamplingParams(seed=6), t) == tokens[t] for t in range(400))
    greedy = sum(int(copy.argmax()) == token for token in tokens)
    assert coupled > 2 * greedy


def test_sharpening_moves_towards_the_likeliest() -> None:
    """`sharpen` divides the temperature: at large values a draft is the greedy one, at 1 it is the target's rule."""
    row = bfloat16_like(7, 300, 1.0)
    sampler = Sampler(300, frozenset())
    assert {sampler.draft_token(row, SamplingParams(seed=2), t, sharpen=1e6) for t in range(50)} == {int(row.argmax())}
    halved = SamplingParams(seed=2, temperature=0.5)
    for t in range(50):
        sharper = sampler.draft_token(row, SamplingParams(seed=2), t, sharpen=2.0)
        assert sharper == sampler.draft_token(row, halved, t)


def test_probabilities_are_the_softmax_of_the_vocabulary() -> None:
    """A drafter's confidence is the softmax probability of its token, padding left out."""
    rows = torch.tensor([[0.0, math.log(3.0), 50.0], [0.0, 0.0, 50.0]])
    assert Sampler(2, frozenset()).probabilities(rows, [1, 0]) == pytest.approx([0.75, 0.5])


def test_filters_and_penalties_equal_transformers_away_from_ties() -> None:
    """An oracle that shares no code: the warpers of transformers keep the same ids with the same logits."""
    from transformers.generation import logits_process

    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(0, 300, (1, 40), generator=generator)
    for _ in range(20):
        row = torch.randn(300, generator=generator, dtype=torch.float64) * 3
        p = SamplingParams(temperature=0.8, top_k=60, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
        scores = row[None]
        for step in (
            logits_process.RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
            logits_process.TemperatureLogitsWarper(p.temperature),
            logits_process.TopKLogitsWarper(p.top_k),
            logits_process.TopPLogitsWarper(p.top_p),
            logits_process.MinPLogitsWarper(p.min_p),
        ):
            scores = step(prompt, scores)
        expected = scores.log_softmax(-1)[0]
        got = torch.tensor(reference.log_probs(row.tolist(), p, prompt[0].tolist(), []), dtype=torch.float64)
        assert indices_where(got > -math.inf).tolist() == indices_where(expected > -math.inf).tolist()
        torch.testing.assert_close(got, expected)
