"""The price of a text that no drafter changes: two chances of acceptance, exact."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bench.forward.invariance import apart, together, tokens_per_round


def drawn(source: np.random.Generator, size: int, sharp: float) -> np.ndarray:
    probs = np.exp(sharp * source.standard_normal(size))
    probs[source.random(size) < 0.2] = 0.0
    probs[0] += 0.1
    return probs / probs.sum()


@pytest.mark.parametrize("seed", range(4))
def test_the_chance_of_drawing_the_same_is_that_of_draws(seed: int) -> None:
    """Against 400,000 pairs of draws on shared noise, and between what is proven of it: with t the total variation,
    (1 - t) / (1 + t) at least (2408.07978), and never more than speculative sampling's 1 - t."""
    source = np.random.default_rng(seed)
    target, draft = drawn(source, 12, 1.5), drawn(source, 12, 1.5)
    noise = source.exponential(size=(400_000, 12))
    with np.errstate(divide="ignore"):
        same = (noise / target).argmin(1) == (noise / draft).argmin(1)
    chance = together(target, draft)
    assert chance == pytest.approx(same.mean(), abs=0.004)
    variation = np.abs(target - draft).sum() / 2
    assert apart(target, draft) == pytest.approx(1 - variation)
    assert (1 - variation) / (1 + variation) - 1e-12 <= chance <= 1 - variation + 1e-12


def test_equal_laws_always_draw_the_same_and_disjoint_ones_never() -> None:
    """The ends: nothing is lost where the drafter is the target, nothing accepted where they share no token."""
    law = drawn(np.random.default_rng(1), 50, 2.0)
    assert together(law, law) == pytest.approx(1.0)
    assert together(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


def test_chains_are_right_place_by_place() -> None:
    """Two places with chances 1/2: from the first 1 + 1/2 + 1/4 tokens, from the last 1 + 1/2."""
    assert tokens_per_round([[0.5, 0.5]], 4) == pytest.approx((1.75 + 1.5) / 2)
    assert tokens_per_round([[0.5, 0.5]], 1) == pytest.approx(1.5)
