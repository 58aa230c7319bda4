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


def checked(token: int, draft_probs: Law, rest: Law | None = None) -> Law:
    """Law of the emitted token: `token` where it passes as drawn from `draft_probs`, else one of `rest`."""
    accept = ratio(TARGET, draft_probs, token)
    return plus(tuple(accept * x for x in point(token)), rest or residual(TARGET, draft_probs), 1 - accept)


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


def one_after_the_other(tokens: Sequence[int], laws: Sequence[Law]) -> Law:
    """Multi-candidate sampling: each candidate is tested against the residual that the ones before left."""
    emitted, remaining, target_probs = ZERO, Fraction(1), TARGET
    for token, draft_probs in zip(tokens, laws, strict=True):
        accept = ratio(target_probs, draft_probs, token)
        emitted = plus(emitted, point(token), remaining * accept)
        remaining *= 1 - accept
        target_probs = residual(target_probs, draft_probs)
    return plus(emitted, target_probs, remaining)


def mixture() -> Law:
    result = ZERO
    for weight, probs in zip(WEIGHTS, DRAFTERS, strict=True):
        result = plus(result, probs, weight)
    return result


def chosen(tokens: tuple[int, ...], order: Sequence[int]) -> Law:
    """The candidates of these drafters, one after the other."""
    return one_after_the_other([tokens[i] for i in order], [DRAFTERS[i] for i in order])


def by_votes(tokens: tuple[int, ...]) -> list[int]:
    return sorted(range(len(tokens)), key=lambda i: (-tokens.count(tokens[i]), tokens[i], i))


def independent_tests(tokens: tuple[int, ...]) -> Law:
    """K candidates, each tested against the original target law; none accepted: drawn from it."""
    result, remaining = ZERO, Fraction(1)
    for token, probs in zip(tokens, DRAFTERS, strict=True):
        accept = ratio(TARGET, probs, token)
        result = plus(result, point(token), remaining * accept)
        remaining *= 1 - accept
    return plus(result, TARGET, remaining)


def races(first: Law, second: Law) -> dict[tuple[int, int], Fraction]:
    """P(a race by `first` is won by x and one by `second` by y), both run on the same exponential noise.

    Token i arrives at E_i / law_i: the Gumbel-max trick. Where E_y = t E_x, all others arrive later than both winners
    with probability exp(-E_x c(t)), c piecewise linear: over E_x that is 1 / c(t)^2, and over t a sum of fractions.
    """
    joint: dict[tuple[int, int], Fraction] = {}
    for x, y in product(VOCAB, VOCAB):
        if not first[x] or not second[y]:
            continue
        others = [i for i in VOCAB if i not in (x, y)]
        if x == y:
            slower = [max(first[i] / first[x], second[i] / second[x]) for i in others]
            joint[x, y] = 1 / (1 + sum(slower))
            continue
        # y is slower in the first race, x in the second.
        low = first[y] / first[x]
        high = second[y] / second[x] if second[x] else None
        turns = {first[i] / first[x] * second[y] / second[i] for i in others if second[i]}
        points = [low, *sorted(t for t in turns if low < t and (high is None or t < high))]
        ends: list[Fraction | None] = [*points[1:], high]
        total = Fraction(0)
        for begin, end in zip(points, ends, strict=True):
            if end is not None and end <= begin:
                continue
            middle = begin + 1 if end is None else (begin + end) / 2
            flat, rising = Fraction(1), Fraction(1)
            for i in others:
                still, moving = first[i] / first[x], second[i] / second[y]
                if moving * middle > still:
                    rising += moving
                else:
                    flat += still
            # The integral of 1 / (flat + rising t)^2.
            total += (1 / (flat + rising * begin) - (0 if end is None else 1 / (flat + rising * end))) / rising
        joint[x, y] = total
    return joint


def on_the_drafts_noise(token: int, draft_probs: Law) -> Law:
    """What is drawn after a rejection, given the drafted token, where drafter and target draw on the same noise."""
    joint = races(draft_probs, residual(TARGET, draft_probs))
    return tuple(joint.get((token, other), Fraction(0)) / draft_probs[token] for other in VOCAB)


Rule = tuple[Callable[[tuple[int, ...]], Law], Sequence[Law]]
"""The law of the emitted token given what was drawn, and the drafters that draw, each one candidate."""

ONE, BEST = DRAFTERS[0], DRAFTERS[0].index(max(DRAFTERS[0]))
TOP_K_TARGET = normalised([*TARGET[:2], Fraction(0), Fraction(0)])
LIKELIEST = sorted(VOCAB, key=lambda token: -TARGET[token])[:2]

RIGHT: dict[str, Rule] = {
    "one token, tested with the very law it is drawn from": (lambda t: checked(t[0], ONE), [ONE]),
    "several candidates in a fixed order": (lambda t: one_after_the_other(t, DRAFTERS), DRAFTERS),
}
WRONG: dict[str, Rule] = {
    # As if the drafter that won had drawn it alone.
    "voted token, winner's own law": (lambda t: checked(elect(t)[0], DRAFTERS[elect(t)[1]]), DRAFTERS),
    "voted token, weighted mixture": (lambda t: checked(elect(t)[0], mixture()), DRAFTERS),
    "argmax draft, softmax in the test": (lambda t: checked(BEST, ONE), [ONE]),
    # An order that depends on what was sampled.
    "candidates in the order of votes": (lambda t: chosen(t, by_votes(t)), DRAFTERS),
    # A token that two drafters drew is tested once, as a trie holds it.
    "duplicates merged in the trie": (lambda t: chosen(t, [i for i, x in enumerate(t) if x not in t[:i]]), DRAFTERS),
    "independent tests against the original law": (independent_tests, DRAFTERS),
    "raw ratio, filtered residual": (lambda t: checked(t[0], ONE, residual(TOP_K_TARGET, ONE)), [ONE]),
    # Those that stay are tested as if none were dropped.
    "dropped for its own low probability": (
        lambda t: TARGET if ONE[t[0]] <= Fraction(1, 5) else checked(t[0], ONE),
        [ONE],
    ),
    # Shared noise goes with equality alone. It was seen in a public server.
    "shared noise, accepted by the ratio": (
        lambda t: checked(t[0], DRAFTERS[2], on_the_drafts_noise(t[0], DRAFTERS[2])),
        [DRAFTERS[2]],
    ),
    # Two of four here, 50 of many.
    "among the target's likeliest": (lambda t: point(t[0]) if t[0] in LIKELIEST else TARGET, [ONE]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_exact(name: str) -> None:
    """The enumeration itself is right: rules proven exact come out with total variation 0, in rational numbers."""
    assert over_candidates(*RIGHT[name]) == TARGET


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_biased_and_caught(name: str) -> None:
    """A token decided by a probability that is not the law it was drawn from is biased, and the checker sees it."""
    target = TOP_K_TARGET if "filtered" in name else TARGET
    emitted = over_candidates(*WRONG[name])
    assert sum(emitted) == 1
    assert total_variation(emitted, target) > 0.01
    rng = np.random.default_rng(1)
    law_of_target = np.array(target, dtype=np.float64)
    assert not follows(rng.multinomial(DRAWS, np.array(emitted, dtype=np.float64)), law_of_target)
    assert follows(rng.multinomial(DRAWS, law_of_target), law_of_target)


def test_races_on_shared_noise_are_won_as_each_alone_would_be() -> None:
    """The joint law that the rule of shared noise stands on: its margins are the two laws, and equal laws always have
    one winner."""
    for first, second in product((TARGET, *DRAFTERS), repeat=2):
        joint = races(first, second)
        for one in VOCAB:
            assert sum(joint.get((one, other), Fraction(0)) for other in VOCAB) == first[one]
            assert sum(joint.get((other, one), Fraction(0)) for other in VOCAB) == second[one]
    assert races(TARGET, TARGET) == {(x, x): TARGET[x] for x in VOCAB} | {
        (x, y): Fraction(0) for x, y in product(VOCAB, repeat=2) if x != y
    }


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
