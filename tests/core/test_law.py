"""The law: what the sampler draws follows softmax(logp), at each position by itself, whatever was drafted."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from moot.core.acceptance import walk
from moot.core.noise import choice_seed, gumbel, hash32
from moot.core.sampling import log_probs, sample_token
from moot.core.types import Draft, Proposal, SamplingParams
from moot.core.voting.voting import vote
from moot.model.sampling.sampler import History, Sampler
from tests.core.law_checker import DRAWS, follows, gumbel_grid, hash_grid

LOGITS = [1.25, 0.5, 0.5, -0.75, 2.0, -2.5, 0.0]
VOCAB = len(LOGITS)
SEED = 20240817

CASES = {
    "temperature 1": SamplingParams(),
    "temperature 0.3": SamplingParams(temperature=0.3),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 2": SamplingParams(temperature=2.0),
    "top_k, cutting a tie": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.8),
    "top_p, cutting a tie": SamplingParams(top_p=0.75),
    "min_p": SamplingParams(min_p=0.2),
    "all filters": SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.1),
    "bias": SamplingParams(logit_bias={5: 4.0, 4: -1.0}),
    "allowed ids": SamplingParams(allowed_token_ids=frozenset({1, 3, 5})),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
}
PROMPT, OUTPUT = [0, 3], [4, 4, 1]


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """G [draws, vocab] of one seed at successive positions."""
    return gumbel_grid(hash_grid([SEED] * DRAWS, range(DRAWS), VOCAB))


def test_the_grid_is_the_sampler_s_noise(noise: np.ndarray) -> None:
    """What the law tests draw from is G(seed, t, x) itself."""
    for position in range(0, DRAWS, 997):
        assert noise[position] == pytest.approx([gumbel(SEED, position, x) for x in range(VOCAB)], rel=1e-12)
    assert hash_grid([5], [6], 3).tolist() == [[hash32(5, 6, x) for x in range(3)]]


@pytest.mark.parametrize("case", CASES)
def test_law_of_one_position(case: str, noise: np.ndarray) -> None:
    """Gumbel-max: the law of token(t) is softmax(logp), per temperature and filter; filtered ids never occur.

    The draws are those of both samplers: the first ones are compared id by id.
    """
    params = CASES[case]
    logp = np.array(log_probs(LOGITS, params, PROMPT, OUTPUT))
    tokens = (logp + noise).argmax(axis=1)
    assert follows(np.bincount(tokens, minlength=VOCAB), np.exp(logp))
    params = SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": SEED})
    sampler, row, history = Sampler(VOCAB, frozenset()), torch.tensor(LOGITS), History(PROMPT, OUTPUT)
    for position in range(400):
        assert sample_token(LOGITS, params, position, PROMPT, OUTPUT) == tokens[position]
        assert sampler.sample(row, params, position, history) == tokens[position]


def test_the_checker_tells_a_wrong_temperature(noise: np.ndarray) -> None:
    """The power of the checker: a law off by one percent in temperature is rejected."""
    logp = np.array(log_probs(LOGITS, SamplingParams(temperature=1.01)))
    counts = np.bincount((logp + noise).argmax(axis=1), minlength=VOCAB)
    assert follows(counts, np.exp(logp))
    assert not follows(counts, np.exp(log_probs(LOGITS, SamplingParams())))


def _independent(first: np.ndarray, second: np.ndarray) -> bool:
    table = np.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)
    return bool(stats.chi2_contingency(table).pvalue > 1e-6)


@pytest.mark.parametrize("lag", [1, 2, 16, 64])
def test_successive_positions_are_independent(lag: int, noise: np.ndarray) -> None:
    """What was drawn at one position tells nothing about the next."""
    tokens = (np.array(LOGITS) + noise).argmax(axis=1)
    assert _independent(tokens[:-lag], tokens[lag:])


def test_seeds_are_independent_and_each_draw_follows_the_law() -> None:
    """Neighbouring seeds at one position, and the choices of one request, draw independently from the law."""
    draws = 200_000
    logp = np.array(log_probs(LOGITS, SamplingParams()))
    by_seed = (logp + gumbel_grid(hash_grid(range(draws), [77] * draws, VOCAB))).argmax(axis=1)
    assert follows(np.bincount(by_seed, minlength=VOCAB), np.exp(logp))
    assert _independent(by_seed[:-1], by_seed[1:])
    choices = [
        (logp + gumbel_grid(hash_grid([choice_seed(seed, i) for seed in range(50_000)], [0] * 50_000, VOCAB))).argmax(1)
        for i in range(2)
    ]
    assert all(follows(np.bincount(choice, minlength=VOCAB), np.exp(logp)) for choice in choices)
    assert _independent(choices[0], choices[1])


TARGET = np.array([[0.0, 1.0, -0.5], [1.5, 0.0, 0.5], [-0.3, 0.9, 0.8]])
DRAFTERS = (
    np.array([[0.3, 0.5, -0.2], [1.0, 0.4, 0.1], [0.2, 0.5, 1.0]]),
    np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    np.array([[-0.4, 1.3, 0.0], [1.2, -0.4, 0.9], [0.0, 0.0, 0.0]]),
)
START = 0


def _decode(logits: np.ndarray, noise: np.ndarray, text: tuple[int, ...] = ()) -> tuple[int, ...]:
    """What plain decoding of a Markov model (row = token before) adds to `text` until all of `noise` is used."""
    tokens = list(text)
    for position in range(len(text), len(noise)):
        tokens.append(int((logits[tokens[-1] if tokens else START] + noise[position]).argmax()))
    return tuple(tokens[len(text) :])


def _voted(noise: np.ndarray, text: tuple[int, ...]) -> Draft:
    proposals = [Proposal(_decode(logits, noise, text), drafter_id=str(index)) for index, logits in enumerate(DRAFTERS)]
    return vote(proposals, {"0": 1.0, "1": 1.1, "2": 1.2}, policy="majority").draft


DRAFTS = {
    "greedy": lambda noise, text: Draft.chain(_decode(DRAFTERS[0], np.zeros_like(noise), text)),
    "coupled": lambda noise, text: Draft.chain(_decode(DRAFTERS[0], noise, text)),
    "voted": _voted,
}


def _rounds(kind: str, noise: np.ndarray) -> tuple[tuple[int, ...], int]:
    """A text made by drafting and verifying until the noise is used, and how many draft tokens were accepted."""
    text: tuple[int, ...] = ()
    accepted = 0
    while len(text) < len(noise):
        base = text

        def token_at(node: int, path: tuple[int, ...], base: tuple[int, ...] = base) -> int:
            return _decode(TARGET, noise[: len(base) + len(path) + 1], base + path)[0]

        step = walk(DRAFTS[kind](noise, text), token_at, lambda token, count: False, len(noise) - len(text))
        text += step.output_token_ids
        accepted += step.num_accepted
    return text, accepted


@pytest.mark.parametrize("kind", DRAFTS)
def test_law_of_texts_with_drafts(kind: str) -> None:
    """C02: texts of three tokens made by drafts and verification are plain decoding's, and follow the target's law.

    A draft coupled through the noise, or chosen by a vote over such drafts, depends on what the target draws next;
    the law of the text does not notice.
    """
    draws = 10_000
    grid = gumbel_grid(hash_grid(np.repeat(np.arange(draws), 3).tolist(), list(range(3)) * draws, 3))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for noise in grid.reshape(draws, 3, 3):
        text, of_draft = _rounds(kind, noise)
        assert text == _decode(TARGET, noise)
        counts[text] += 1
        accepted += of_draft
    assert draws / 5 < accepted < 3 * draws, "drafts were accepted and rejected, or this shows nothing"
    probs = np.exp(TARGET) / np.exp(TARGET).sum(axis=1, keepdims=True)
    texts = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    law = [probs[START, a] * probs[a, b] * probs[b, c] for a, b, c in texts]
    assert math.isclose(sum(law), 1.0)
    assert follows([counts[text] for text in texts], law)
