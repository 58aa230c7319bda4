"""The sampler for all rows of a step equals the reference id by id, whatever rows share the call."""

from __future__ import annotations

import math

import pytest
import torch

from moot.core.history import History
from moot.core.types import SamplingParams
from moot.model.sampling.batch import BatchSampler, Drawn, RowSpec
from moot.model.sampling.sampler import Sampler
from tests.model.sampling.test_sampler import LARGE, expected


@pytest.mark.parametrize("filters", [{"top_k": 40}, {"top_k": 1500}, {"top_k": 2000, "top_p": 0.9}, {"top_p": 0.95}])
@pytest.mark.parametrize("spread", [0.0, 0.4, 6.0])
def test_filters_at_and_past_the_candidates(filters: dict[str, float], spread: float) -> None:
    """A nucleus or top-k of fewer, of more tokens than there are candidates, and of equal ones only."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(12, LARGE, generator=generator) * spread
    specs = [RowSpec(SamplingParams(seed=9, **filters), position, History([])) for position in range(len(rows))]
    found = BatchSampler(Sampler(LARGE, frozenset())).draw(rows, specs)
    assert [one.token_id for one in found] == [
        expected(row, LARGE, spec, [[], [], []]) for row, spec in zip(rows, specs, strict=True)
    ]


def test_logprobs_and_candidates_are_those_of_the_raw_row() -> None:
    """Log-probabilities, rank, alternatives and most likely ids equal the per-row sampler's, asked for or not."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(4, 60, generator=generator)
    sampler = Sampler(50, frozenset())
    settings_of_rows = [(None, 0), (0, 3), (5, 0), (2, 50)]
    specs = [
        RowSpec(SamplingParams(seed=index, top_k=7, logit_bias={3: 2.0}), index, History([]), *wants)
        for index, wants in enumerate(settings_of_rows)
    ]
    for row, spec, drawn in zip(rows, specs, BatchSampler(sampler).draw(rows, specs), strict=True):
        assert drawn.token_id is not None
        assert drawn.candidates == tuple(row[:50].argsort(descending=True)[: spec.num_candidates].tolist())
        if spec.num_top is None:
            assert drawn.logprobs is None
            continue
        wanted = sampler.logprobs(row, drawn.token_id, spec.num_top)
        assert drawn.logprobs is not None
        assert drawn.logprobs.rank == wanted.rank
        assert drawn.logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-12)
        assert [one for one, _ in drawn.logprobs.top] == [one for one, _ in wanted.top]


def test_poisoned_rows_are_marked_alone() -> None:
    """NaN, +inf or nothing allowed spoils its own row and no other, with log-probabilities asked for as well."""
    rows = torch.zeros(5, 12)
    rows[0, 3], rows[1, 2], rows[2] = math.nan, math.inf, -math.inf
    for params_of_all in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)):
        specs = [RowSpec(params_of_all, index, History([]), 2, 2) for index in range(5)]
        drawn = BatchSampler(Sampler(12, frozenset())).draw(rows, specs)
        assert [one.token_id is None for one in drawn] == [True, True, True, False, False]
        assert drawn[0] == Drawn(None)
    assert BatchSampler(Sampler(12, frozenset())).draw(rows[:0], []) == []
