"""Hints for drafters: the likeliest ids, found without sorting the vocabulary."""

from __future__ import annotations

import pytest
import torch

from moot.model.sampling.logits import joined
from moot.model.sampling.sampler import likeliest


@pytest.mark.parametrize(("size", "width"), [(1, 1), (7, 8), (64, 1), (259, 2), (640, 8), (49_152, 8), (50_257, 20)])
def test_the_hints_are_the_highest_logits_in_order(size: int, width: int) -> None:
    """What a drafter is told are the same ids as sorting all logits gives, for every vocabulary size and width."""
    logits = torch.randperm(4 * size, generator=torch.Generator().manual_seed(size)).view(4, size).float()
    expected = logits.sort(dim=1, descending=True).indices[:, :width]
    assert likeliest(logits, width) == [tuple(row) for row in expected.tolist()]


def test_a_row_with_few_finite_logits_gives_ids_of_the_vocabulary() -> None:
    """Masked ids (minus infinity) come last, and no hint lies outside the vocabulary."""
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 5:8] = 1.0
    for row in likeliest(logits, 8):
        assert set(row[:3]) == {5, 6, 7}
        assert all(0 <= token_id < 1000 for token_id in row)


def test_rows_are_joined_without_a_copy_only_where_they_follow_one_another() -> None:
    """Whatever the parts are, all rows come out in order; neighbours of one tensor are not copied."""
    logits = torch.randn(9, 5)
    parts = logits.split([2, 3, 4])
    whole = joined(parts)
    assert torch.equal(whole, logits)
    assert whole.data_ptr() == logits.data_ptr()
    one, two, three = parts
    for chosen in ([one, three], [two, one], [one, two.clone()], [one, logits.t().contiguous().t()[2:5]], [three]):
        assert torch.equal(joined(chosen), torch.cat(chosen))
