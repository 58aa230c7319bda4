"""The noise on tensors is the noise of the reference: equal hashes bit by bit, on every device there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core import noise as reference
from moot.model.sampling import logits as noise

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
IDS = [0, 1, 2, 255, 256, 49151, 2**18 - 1, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=80)
@given(st.integers(-(2**64), 2**65), st.integers(0, 2**40), st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_hashes_are_equal_bit_by_bit(device: str, seed: int, position: int, token_ids: list[int]) -> None:
    """h is one function of (seed, position, id), whichever implementation computes it."""
    ids = torch.tensor(token_ids + IDS, device=device)
    before = ids.clone()
    expected = [reference.hash32(seed, position, token_id) for token_id in token_ids + IDS]
    assert noise.hash32(seed, position, ids).tolist() == expected
    assert torch.equal(ids, before), "the ids are left as they were"


@pytest.mark.parametrize("device", DEVICES)
def test_gumbel_within_two_ulp_of_the_reference(device: str) -> None:
    """G agrees within 2 ulp of float64 at the scale of max(1, |G|), over a whole vocabulary."""
    got = noise.gumbel(17, 4095, torch.arange(49152, device=device)).cpu().numpy()
    expected = np.array([reference.gumbel(17, 4095, token_id) for token_id in range(49152)])
    assert (abs(got - expected) <= 2 * np.spacing(np.maximum(1.0, abs(expected)))).all()


@pytest.mark.parametrize("device", DEVICES)
def test_one_minus_uniform_is_precise_to_single_precision(device: str) -> None:
    """The screen's 1 - u has a relative error of at most 2^-23 against exact arithmetic on the hash, never 0."""
    got = noise.one_minus_uniform(99, 12, torch.arange(49152, device=device)).cpu().numpy().astype(np.float64)
    exact = np.array([(2**32 - 0.5 - reference.hash32(99, 12, token_id)) * 2.0**-32 for token_id in range(49152)])
    assert (abs(got / exact - 1.0) <= 2.0**-23).all()
    assert (got > 0).all()


def test_both_routes_of_the_screen_are_one_hash() -> None:
    """Wrapping unsigned arithmetic on a CPU equals the masked signed one that other devices use."""
    ids = torch.tensor(IDS)
    assert noise._hash32_numpy(2**63 + 5, 31, ids.numpy()).tolist() == noise.hash32(2**63 + 5, 31, ids).tolist()
