"""The drafts of bench.branch_time."""

from __future__ import annotations

import pytest

from lab.bench.forward.branch_time import comb
from moot.core.types import ROOT
from moot.model.cache.kv_cache import depths_of, paths


def test_a_comb_has_the_tokens_and_paths_that_were_asked_for() -> None:
    """The root row, then as many tokens in as many paths, parents before children; more paths than fit are refused."""
    for num_leaves in (1, 2, 4):
        parents = comb(8, num_leaves)
        assert len(parents) == 9
        assert parents[0] == ROOT
        assert max(depths_of(parents)) == 8 - (num_leaves - 1)
        assert len(list(paths(parents))) == num_leaves
    with pytest.raises(ValueError, match="no 6 paths"):
        comb(8, 6)
