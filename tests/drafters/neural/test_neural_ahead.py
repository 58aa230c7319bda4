"""Drafting ahead with a draft model: it goes on where it stood, and takes no room from anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from moot.core.types import SamplingParams
from moot.drafters.interface import Ask
from moot.drafters.neural.neural import NeuralDrafter
from moot.drafters.registry import create
from moot.testing.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft") / "model", context=1024)


def neural(folder: Path, **options: object) -> NeuralDrafter:
    fixed = {"model": folder, "dtype": "float64", "device": "cpu", "batch_invariant": True, "num_threads": 1}
    drafter = create("neural", fixed | options)
    assert isinstance(drafter, NeuralDrafter)
    return drafter


def test_steps_ahead_are_the_chain_and_their_cache_is_kept(folder: Path) -> None:
    """One token at a time, asked or ahead, gives the chain of one ask, and each token is fed once."""
    drafter = neural(folder)
    session, other = drafter.open([5, 6, 7], GREEDY), drafter.open([5, 6, 7], GREEDY)
    (expected,) = drafter.propose([Ask(other, 9)])[0]
    for length in range(1, 10):
        (got,) = drafter.propose([Ask(session, length, is_ahead=length > 4)])[0]
        assert got.token_ids == expected.token_ids[:length]
        assert session.cache.length == 3 + length - 1
    drafter.extend(session, [*expected.token_ids[:5], 3])
    assert session.cache.length == 3 + 5


def test_drafting_ahead_evicts_nobody(folder: Path) -> None:
    """Where the cache is full, a session that drafts ahead waits, and can be drafted for as soon as it asks."""
    drafter = neural(folder, kv_capacity_tokens=1024)  # two pages of 512
    first, second = drafter.open([1] * 510, GREEDY), drafter.open([2, 3], GREEDY)
    (before,) = drafter.propose([Ask(first, 2), Ask(second, 2)])[0]
    kept = second.cache.length
    # The next page of `first` would have to be that of `second`.
    for length in range(3, 6):
        (got,) = drafter.propose([Ask(first, length, is_ahead=True)])[0]
    assert second.cache.length == kept
    assert len(got.token_ids) < 5
    assert got.token_ids[:2] == before.token_ids
    (asked,) = drafter.propose([Ask(first, 5)])[0]
    assert len(asked.token_ids) == 5
    assert second.cache.length == 0
    # Its cache is gone, so nothing is read again for what nobody asked for.
    assert len(drafter.propose([Ask(second, 3, is_ahead=True)])[0][0].token_ids) == 2
    assert second.cache.length == 0
