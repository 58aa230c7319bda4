"""The reference sampler: what each parameter means, and in which order they act."""

import math
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import RequestPoisoned
from moot.core.history import History
from moot.core.noise import gumbel
from moot.core.sampling import MASKED, filter_logits, log_probs, process_logits, sample_token, token_logprobs
from moot.core.types import SamplingParams


def kept(logits: list[float], **params: object) -> list[int]:
    """Ids that the filters leave."""
    filtered = filter_logits(logits, SamplingParams(**params))  # type: ignore[arg-type]
    return [token_id for token_id, logit in enumerate(filtered) if logit != MASKED]


def test_token_is_the_argmax_of_logp_plus_noise() -> None:
    """token(t) = argmax logp(x) + G(seed, t, x): written out here once more, over many positions."""
    params = SamplingParams(temperature=0.8, seed=99)
    logits = [0.3, -1.0, 2.0, 1.5]
    logp = log_probs(logits, params)
    for position in range(300):
        scores = [value + gumbel(99, position, token_id) for token_id, value in enumerate(logp)]
        assert sample_token(logits, params, position, [], []) == scores.index(max(scores))


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 9.999e-6])
def test_below_the_one_limit_everything_is_greedy(temperature: float) -> None:
    """C18: temperatures under 1e-5 are greedy whatever the seed, even where noise could turn a near tie; of equal
    logits the lowest id is taken, always (C01)."""
    for logits in ([1.0, 1.0 + 1e-12], [0.0, 1.0, 1.0]):
        every = [SamplingParams(temperature=temperature, seed=seed) for seed in range(50)]
        assert {sample_token(logits, params, 0, [], []) for params in every} == {1}


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 2.0])
def test_from_the_limit_on_noise_decides_without_overflow(temperature: float) -> None:
    """C18: at 1e-5 and above tokens are sampled: equal logits both occur, and huge logits overflow nothing."""
    drawn = {
        sample_token([5.0, 5.0, -3e38, 0.0], SamplingParams(temperature=temperature, seed=seed), 0, [], [])
        for seed in range(60)
    }
    assert drawn >= {0, 1}
    assert 2 not in drawn
    assert sample_token([-1e308, 1e308, 0.0], SamplingParams(temperature=temperature), 0, [], []) == 1


def test_temperature_two_flattens() -> None:
    """C18: the law at temperature 2 is softmax(logits / 2)."""
    law = [math.exp(value) for value in log_probs([0.0, math.log(4.0)], SamplingParams(temperature=2.0))]
    assert law == pytest.approx([1 / 3, 2 / 3])


HALVES = [math.log(0.5), math.log(0.25), math.log(0.125), math.log(0.125)]
TIED = [1.0, 2.0, 1.0, 2.0, 1.0]
THIRDS = [math.log(0.4), math.log(0.3), math.log(0.3)]


@pytest.mark.parametrize(
    ("logits", "filters", "left"),
    [
        # Exactly k tokens by (logit descending, id ascending), also where logits are equal.
        (TIED, {"top_k": 3}, [0, 1, 3]),
        (TIED, {"top_k": 9}, [0, 1, 2, 3, 4]),
        (TIED, {"top_k": 0}, [0, 1, 2, 3, 4]),
        # The nucleus ends with the token that reaches p, and holds at least one.
        (HALVES, {"top_p": 0.6}, [0, 1]),
        (HALVES, {"top_p": 0.5}, [0]),
        (HALVES, {"top_p": 0.875}, [0, 1, 2]),
        (HALVES, {"top_p": 1e-9}, [0]),
        (HALVES, {"top_p": 1.0}, [0, 1, 2, 3]),
        # It acts on the mass that top-k left: 0.4 of 0.7 already crosses 0.55.
        (THIRDS, {"top_k": 2, "top_p": 0.55}, [0]),
        (THIRDS, {"top_p": 0.55}, [0, 1]),
        # At least min_p times the highest probability, equality included.
        ([0.0, math.log(0.5), math.log(0.49)], {"min_p": 0.5}, [0, 1]),
        ([2.0, 2.0, 1.9], {"min_p": 1.0}, [0, 1]),
        # Temperature comes first: at 2 the second token is above min_p, at 1 it is not.
        ([0.0, math.log(0.25)], {"min_p": 0.4}, [0]),
        ([0.0, math.log(0.25)], {"min_p": 0.4, "temperature": 2.0}, [0, 1]),
    ],
)
def test_filters_leave_what_they_say(logits: list[float], filters: dict[str, float], left: list[int]) -> None:
    """Each by itself, at its edges, and in their order: temperature, top-k, top-p, min-p."""
    assert kept(logits, **filters) == left


@pytest.mark.parametrize("count", [3, 7, 10, 49])
def test_top_p_on_equal_logits_counts_exactly(count: int) -> None:
    """n equal logits: p = m / n keeps the m lowest ids, though sums of 1 / n in float64 would miss it."""
    for number in range(1, count):
        assert kept([0.7] * count, top_p=number / count) == list(range(number))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0.05, 0.99), st.integers(0, 12), st.sampled_from([0.0, 0.02, 0.3]))
def test_filters_equal_the_textbook_rules_on_generic_logits(draw: int, top_p: float, top_k: int, min_p: float) -> None:
    """Exact weights change nothing away from ties: plain float64 probabilities give the same sets."""
    rng = random.Random(draw)
    logits = [rng.gauss(0, 3) for _ in range(12)]
    order = sorted(range(12), key=lambda token_id: -logits[token_id])[: top_k or 12]
    total = sum(math.exp(logits[token_id]) for token_id in order)
    nucleus, mass = [], 0.0
    for token_id in order:
        nucleus.append(token_id)
        mass += math.exp(logits[token_id]) / total
        if mass >= top_p:
            break
    best = max(logits)
    expected = sorted(token_id for token_id in nucleus if math.exp(logits[token_id] - best) >= min_p)
    assert kept(logits, top_k=top_k, top_p=top_p, min_p=min_p) == expected


def test_repetition_penalty_covers_prompt_and_output_others_output_only() -> None:
    """Repetition moves positive logits down by division, negative by multiplication; prompt ids count for it alone. A
    bias that makes a logit positive is then divided."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    processed = process_logits([4.0, -4.0, 4.0, 4.0], params, [0, 1], [2, 2])
    assert processed == [2.0, -8.0, 4.0 / 2 - 2 * 0.25 - 0.5, 4.0]
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 5.0})
    assert process_logits([-1.0, 0.0], params, [0], []) == [2.0, 0.0]


def test_bias_applies_at_every_position_and_outside_ids_do_nothing() -> None:
    """C17: bias holds at each position alike; ids outside the vocabulary never index."""
    params = SamplingParams(temperature=0.0, logit_bias={1: 100.0, -1: 50.0, 7: 1e3})
    assert [sample_token([3.0, 0.0, 1.0], params, t, [0], [1] * t) for t in range(5)] == [1] * 5


def test_only_allowed_ids_come_out() -> None:
    """C17: allowed_token_ids and the grammar mask both restrict, at every position."""
    params = SamplingParams(temperature=1.0, allowed_token_ids=frozenset({1, 2, 99}), seed=3)
    assert {sample_token([9.0, 0.0, 0.0, 9.0], params, t, [], []) for t in range(100)} == {1, 2}
    assert {sample_token([9.0, 0.0, 0.0, 9.0], params, t, [], [], grammar_allowed={2, 3}) for t in range(50)} == {2}


def test_min_tokens_masks_all_ending_ids_until_reached() -> None:
    """C12: end and stop ids cannot come before min_tokens, wherever in a draft the position lies."""
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=frozenset({1}))
    logits = [5.0, 4.0, 3.0]
    for output, expected in (([], 2), ([2], 2), ([2, 2], 2), ([2, 2, 2], 0)):
        assert sample_token(logits, params, len(output), [], output, end_token_ids=frozenset({0})) == expected


def test_ignored_end_ids_are_not_masked_by_min_tokens() -> None:
    """With ignore_eos the model's end ids end nothing: min_tokens leaves them alone, and masks stop ids still."""
    params = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True, stop_token_ids=frozenset({1}))
    assert sample_token([5.0, 9.0], params, 0, [], [], end_token_ids=frozenset({0})) == 0


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [1.0, math.inf], [-math.inf, -math.inf]])
def test_rows_that_are_not_finite_are_refused(logits: list[float]) -> None:
    """A row of NaN or infinity fails its own request instead of choosing something."""
    for temperature in (0.0, 1.0):
        with pytest.raises(RequestPoisoned):
            sample_token(logits, SamplingParams(temperature=temperature), 0, [], [])


def test_nothing_allowed_is_refused() -> None:
    """When every id is masked there is no token to choose."""
    params = SamplingParams(allowed_token_ids=frozenset({0}), min_tokens=1, stop_token_ids=frozenset({0}))
    with pytest.raises(RequestPoisoned):
        sample_token([1.0, 2.0], params, 0, [], [])


def test_single_masked_logits_are_allowed() -> None:
    """A model may mask ids itself by -inf."""
    assert sample_token([-math.inf, 0.0], SamplingParams(seed=1), 0, [], []) == 1


def test_logprobs_are_of_the_raw_logits() -> None:
    """C16: log-softmax of the row as the model gave it; rank counts higher logits, then lower ids of a tie."""
    logits = [math.log(0.25), math.log(0.5), math.log(0.25)]
    result = token_logprobs(logits, 2, 2)
    assert result.logprob == pytest.approx(math.log(0.25))
    assert result.rank == 3
    assert [token_id for token_id, _ in result.top] == [1, 0]
    assert [value for _, value in result.top] == pytest.approx([math.log(0.5), math.log(0.25)])


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_history_counts_what_was_appended(prompt: list[int], output: list[int], path: list[int]) -> None:
    """Incremental counts and the overlay for draft tokens equal counting from scratch; the overlay leaves no trace."""
    history = History(prompt)
    for token_id in output:
        history.append([token_id])
    before = history.seen()
    for seen, length, counted in (
        (history.with_path(path).seen(), history.with_path(path).num_output, output + path),
        (history.seen(), history.num_output, output),
    ):
        assert length == len(counted)
        assert dict(zip(*seen, strict=True)) == {x: counted.count(x) for x in {*prompt, *counted}}
        assert len(seen[0]) == len(set(seen[0]))
    assert history.seen() == before
    assert isinstance(before[0], array)
