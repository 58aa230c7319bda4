"""Wrong acceptance rules that look right, each by its exact law: biased, and rejected by the checker of our own rule.

Laws are enumerated in rational numbers over everything that is drawn, so a total variation is exact. Each wrong rule
differs by one change from a right one that is enumerated by the same code and comes out with total variation 0.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np
import pytest

from moot.core.acceptance import walk
from moot.core.types import Draft, Proposal
from moot.core.voting.voting import vote
from tests.core.law_checker import DRAWS, follows, total_variation

Law = tuple[Fraction, ...]


def law(*percent: int) -> Law:
    assert sum(percent) == 100
    return tuple(Fraction(part, 100) for part in percent)


TARGET = law(50, 30, 15, 5)
DRAFTERS = (law(30, 20, 35, 15), law(25, 40, 15, 20), law(20, 25, 45, 10))
WEIGHTS = (Fraction(2, 5), Fraction(7, 20), Fraction(1, 4))
VOCAB = range(len(TARGET))
ZERO: Law = tuple(Fraction(0) for _ in VOCAB)


def point(token: int) -> Law:
    return tuple(Fraction(int(other == token)) for other in VOCAB)


def plus(first: Law, second: Law, factor: Fraction = Fraction(1)) -> Law:
    return tuple(a + factor * b for a, b in zip(first, second, strict=True))


def normalised(weights: Sequence[Fraction]) -> Law:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def residual(target_probs: Law, draft_probs: Law) -> Law:
    """What is drawn from after a rejection; anything where a rejection is impossible."""
    rest = [max(p - q, Fraction(0)) for p, q in zip(target_probs, draft_probs, strict=True)]
    return normalised(rest) if sum(rest) else target_probs


def ratio(target_probs: Law, draft_probs: Law, token: int) -> Fraction:
    return min(Fraction(1), target_probs[token] / draft_probs[token]) if draft_probs[token] else Fraction(1)


def accept_or_else(token: int, accept: Fraction, rejected: Law) -> Law:
    """Law of the emitted token: `token` when accepted, else drawn from `rejected`."""
    return plus(tuple(accept * x for x in point(token)), rejected, 1 - accept)


def candidates(laws: Sequence[Law] = DRAFTERS) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """One token of each drafter, drawn independently: all outcomes with their probabilities."""
    for tokens in product(VOCAB, repeat=len(laws)):
        yield tokens, prod((probs[token] for probs, token in zip(laws, tokens, strict=True)), start=Fraction(1))


def over_candidates(emitted: Callable[[tuple[int, ...]], Law], laws: Sequence[Law] = DRAFTERS) -> Law:
    result = ZERO
    for tokens, probability in candidates(laws):
        result = plus(result, emitted(tokens), probability)
    return result


def elect(tokens: tuple[int, ...]) -> tuple[int, int]:
    """The token with the largest weight of votes, and the heaviest drafter that proposed it (they are sorted)."""
    support = {token: sum(w for w, other in zip(WEIGHTS, tokens, strict=True) if other == token) for token in tokens}
    token = max(support, key=lambda candidate: (support[candidate], -candidate))
    return token, tokens.index(token)


# Right rules, enumerated by the same parts.


def one_honest_sample() -> Law:
    """Speculative sampling of one token drawn from the very law it is tested with."""
    q = DRAFTERS[0]
    return over_candidates(lambda t: accept_or_else(t[0], ratio(TARGET, q, t[0]), residual(TARGET, q)), [q])


def one_after_the_other(tokens: Sequence[int], laws: Sequence[Law]) -> Law:
    """Multi-candidate sampling: each candidate is tested against the residual that the ones before left."""
    emitted, remaining, target_probs = ZERO, Fraction(1), TARGET
    for token, draft_probs in zip(tokens, laws, strict=True):
        accept = ratio(target_probs, draft_probs, token)
        emitted = plus(emitted, point(token), remaining * accept)
        remaining *= 1 - accept
        target_probs = residual(target_probs, draft_probs)
    return plus(emitted, target_probs, remaining)


def several_in_a_fixed_order() -> Law:
    return over_candidates(lambda tokens: one_after_the_other(tokens, DRAFTERS))


# Wrong rules.


def winner_s_own_law() -> Law:
    """A voted token, tested with the law of the drafter that won, as if that drafter alone had drawn it."""

    def emitted(tokens: tuple[int, ...]) -> Law:
        token, winner = elect(tokens)
        return accept_or_else(token, ratio(TARGET, DRAFTERS[winner], token), residual(TARGET, DRAFTERS[winner]))

    return over_candidates(emitted)


def weighted_mixture() -> Law:
    """A voted token, tested with the weighted mixture of the drafters' laws."""
    mixture = ZERO
    for weight, probs in zip(WEIGHTS, DRAFTERS, strict=True):
        mixture = plus(mixture, probs, weight)
    rest = residual(TARGET, mixture)
    return over_candidates(
        lambda tokens: accept_or_else(elect(tokens)[0], ratio(TARGET, mixture, elect(tokens)[0]), rest)
    )


def argmax_draft_softmax_test() -> Law:
    """The draft is the likeliest token, but ratio and residual use the whole law."""
    q = DRAFTERS[0]
    token = q.index(max(q))
    return accept_or_else(token, ratio(TARGET, q, token), residual(TARGET, q))


def order_of_votes() -> Law:
    """Several sampled candidates, tested in an order that depends on what was sampled."""

    def emitted(tokens: tuple[int, ...]) -> Law:
        order = sorted(range(len(tokens)), key=lambda i: (-tokens.count(tokens[i]), tokens[i], i))
        return one_after_the_other([tokens[i] for i in order], [DRAFTERS[i] for i in order])

    return over_candidates(emitted)


def merged_duplicates() -> Law:
    """Several sampled candidates, but a token that two drafters drew is tested once, as a trie holds it."""

    def emitted(tokens: tuple[int, ...]) -> Law:
        first = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
        return one_after_the_other([tokens[i] for i in first], [DRAFTERS[i] for i in first])

    return over_candidates(emitted)


def independent_tests() -> Law:
    """K candidates, each tested against the original target law; none accepted: drawn from it."""

    def emitted(tokens: tuple[int, ...]) -> Law:
        result, remaining = ZERO, Fraction(1)
        for token, q in zip(tokens, DRAFTERS, strict=True):
            accept = ratio(TARGET, q, token)
            result = plus(result, point(token), remaining * accept)
            remaining *= 1 - accept
        return plus(result, TARGET, remaining)

    return over_candidates(emitted)


TOP_K_TARGET = normalised([*TARGET[:2], Fraction(0), Fraction(0)])


def raw_ratio_filtered_residual() -> Law:
    """The ratio uses the raw target law, the residual the one after top-k."""
    q = DRAFTERS[0]
    return over_candidates(lambda t: accept_or_else(t[0], ratio(TARGET, q, t[0]), residual(TOP_K_TARGET, q)), [q])


def dropped_when_unlikely() -> Law:
    """A drafted token is dropped when its own probability is low; those that stay are tested as if none were."""
    q = DRAFTERS[0]

    def emitted(tokens: tuple[int, ...]) -> Law:
        if q[tokens[0]] <= Fraction(1, 5):
            return TARGET
        return accept_or_else(tokens[0], ratio(TARGET, q, tokens[0]), residual(TARGET, q))

    return over_candidates(emitted, [q])


def in_the_target_s_best() -> Law:
    """A drafted token is accepted when it is among the target's likeliest (two of four here, 50 of many)."""
    best = sorted(VOCAB, key=lambda token: -TARGET[token])[:2]
    return over_candidates(lambda t: point(t[0]) if t[0] in best else TARGET, [DRAFTERS[0]])


WRONG: dict[str, tuple[Callable[[], Law], Law]] = {
    "voted token, winner's own law": (winner_s_own_law, TARGET),
    "voted token, weighted mixture": (weighted_mixture, TARGET),
    "argmax draft, softmax in the test": (argmax_draft_softmax_test, TARGET),
    "candidates in the order of votes": (order_of_votes, TARGET),
    "duplicates merged in the trie": (merged_duplicates, TARGET),
    "independent tests against the original law": (independent_tests, TARGET),
    "raw ratio, filtered residual": (raw_ratio_filtered_residual, TOP_K_TARGET),
    "dropped for its own low probability": (dropped_when_unlikely, TARGET),
    "among the target's likeliest": (in_the_target_s_best, TARGET),
}


@pytest.mark.parametrize("rule", [one_honest_sample, several_in_a_fixed_order])
def test_right_rules_are_exact(rule: Callable[[], Law]) -> None:
    """The enumeration itself is right: rules proven exact come out with total variation 0, in rational numbers."""
    assert rule() == TARGET


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_biased_and_caught(name: str) -> None:
    """A token decided by a probability that is not the law it was drawn from is biased, and the checker sees it."""
    rule, target = WRONG[name]
    emitted = rule()
    assert sum(emitted) == 1
    assert total_variation(emitted, target) > 0.01
    rng = np.random.default_rng(1)
    wrong = rng.multinomial(DRAWS, np.array(emitted, dtype=np.float64))
    right = rng.multinomial(DRAWS, np.array(target, dtype=np.float64))
    assert not follows(wrong, np.array(target, dtype=np.float64))
    assert follows(right, np.array(target, dtype=np.float64))


def _voted_draft(tokens: tuple[int, ...], seconds: tuple[int, ...], shape: str) -> Draft:
    """What the vote of three drafters over two positions makes of their proposals."""
    proposals = [Proposal(pair, drafter_id=str(i)) for i, pair in enumerate(zip(tokens, seconds, strict=True))]
    weights = {str(i): float(weight) for i, weight in enumerate(WEIGHTS)}
    return vote(proposals, weights, policy="majority", shape=shape).draft


@pytest.mark.parametrize("shape", ["chain", "siblings", "tree"])
def test_sample_and_match_is_exact_whatever_is_drafted(shape: str) -> None:
    """Our rule, by the real vote and walk: the emitted texts have total variation 0 from the target, exactly.

    Every outcome of the target's draws at two positions is combined with every proposal of three drafters, with
    probabilities under which the drafters know the target's draw (coupled) half of the time.
    """
    seconds_after = (law(20, 30, 40, 10), law(70, 10, 10, 10), law(5, 5, 5, 85), law(25, 25, 25, 25))
    texts: dict[tuple[int, ...], Fraction] = {}
    accepted: set[int] = set()
    for first, second in product(VOCAB, repeat=2):
        drawn = (first, second)
        probability = TARGET[first] * seconds_after[first][second]
        for tokens, chance in candidates():
            coupled = Fraction(1, 2) * (chance + Fraction(int(tokens == (first, first, first))))
            draft = _voted_draft(tokens, tuple((token + second) % 4 for token in tokens), shape)
            text: tuple[int, ...] = ()
            while len(text) < 2:
                base = len(text)
                step = walk(
                    draft if not text else Draft(),
                    lambda node, path, drawn=drawn, base=base: drawn[base + len(path)],
                    lambda token, count: False,
                    2 - base,
                )
                text += step.output_token_ids
                accepted.add(step.num_accepted)
            texts[text] = texts.get(text, Fraction(0)) + probability * coupled
    assert accepted == {0, 1, 2}
    target = [TARGET[a] * seconds_after[a][b] for a, b in product(VOCAB, repeat=2)]
    assert [texts[text] for text in product(VOCAB, repeat=2)] == target
