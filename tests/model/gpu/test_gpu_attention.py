"""What torch's variable-length kernel is asked for: with a stand-in of its documented meaning, the plain results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moot.model.cache.contiguous import KvShape
from moot.model.cache.kv_cache import depths_of
from moot.model.gpu.paged_attention import PagedAttention
from moot.model.gpu.plan import DevicePlan, Planner, unpack
from moot.model.gpu.pool import PagedCache, PagedPool, upload
from moot.model.inputs import CheckedInput

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")
REQUESTS = (
    (0, [-1, 0, 1]),
    (200, [-1, 0, 0, 1, 1]),
    (509, [-1, 0, 1, 2, 3, 2]),
    (1000, [-1, 0, 1]),
    (2100, [-1]),
    (17 * 512 + 5, [-1, 0]),
)


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: float,
    seqused_k: Tensor,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """One sequence after the other. Rows of no sequence keep garbage; a row without a key gets zeros and +inf, as the
    kernel writes them; causal rows are aligned to the last key."""
    assert return_aux.lse
    assert max_q > 1
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert key.is_contiguous()
    output = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=query.dtype)
    shared = query.shape[1] // key.shape[1]
    for index in range(len(seqused_k)):
        first, end, start, used = (int(x) for x in (*cu_seq_q[index : index + 2], cu_seq_k[index], seqused_k[index]))
        assert used <= max_k
        if end == first:
            continue
        keys = key[start : start + used].repeat_interleave(shared, 1)
        values = value[start : start + used].repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end], keys) * scale
        if window_size == (-1, 0):
            rows, columns = torch.arange(end - first)[:, None], torch.arange(used)[None]
            scores = scores.masked_fill(columns > rows + used - (end - first), -torch.inf)
        empty = scores.isneginf().all(-1) if used else torch.ones(scores.shape[:2], dtype=torch.bool)
        weights = scores.softmax(-1).masked_fill(empty[..., None], 0.0)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, values)
        lse[:, first:end] = scores.logsumexp(-1).masked_fill(empty, torch.inf)
    return output, lse


def make_plan(*, exact: bool) -> tuple[DevicePlan, Tensor, int]:
    pool = PagedPool(KvShape(1, KV_HEADS, DIM, torch.float64, CPU), 40 * 512)
    generator = torch.Generator().manual_seed(0)
    pool.layers[0].normal_(generator=generator)
    planner = Planner(pool)
    for length, parents in REQUESTS:
        cache = PagedCache(pool)
        cache.reserve(length + len(parents))
        cache.length = length
        planner.add(CheckedInput(cache, [1] * len(parents), parents, depths_of(parents), []))
    sizes, packed = planner.finish(exact)
    plan = unpack(sizes, upload(packed, CPU))
    kv = pool.layers[0]
    kv.index_copy_(1, plan.copy_to, kv.index_select(1, plan.copy_from))
    return plan, kv, len(planner.token_ids)


@pytest.mark.parametrize("exact", [True, False])
def test_the_kernel_is_asked_for_what_plain_operations_compute(exact: bool) -> None:
    """Chains, trees, page borders and more than one wave of pages, with and without padding."""
    plan, kv, count = make_plan(exact=exact)
    query = torch.randn(plan.sizes.rows, HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = PagedAttention(False, DIM**-0.5)(query, kv, plan, None)
    kernel = PagedAttention(True, DIM**-0.5, stand_in)(query, kv, plan, None)
    assert plan.sizes.waves == 2
    assert plain[:count].isfinite().all()
    assert torch.allclose(kernel[:count], plain[:count], atol=1e-12)
