"""gpu_check: torch's kernel and the noise, against plain operations and the CPU."""

from __future__ import annotations

from typing import Any

import torch

from lab.bench.gpu_check.subject import Subject
from moot.core.history import History
from moot.core.types import SamplingParams
from moot.model.cache.contiguous import KvShape
from moot.model.gpu.paged_attention import PagedAttention
from moot.model.gpu.plan import Planner, unpack
from moot.model.gpu.pool import PagedCache, PagedPool, upload
from moot.model.inputs import CheckedInput
from moot.model.sampling.batch import BatchSampler, RowSpec
from moot.model.sampling.logits import gumbel, hash32
from moot.model.sampling.sampler import Sampler

Facts = list[tuple[str, str]]

FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


@torch.inference_mode()
def attention(subject: Subject) -> Facts:
    """Chains and trees over several pages, once by the kernel and once by plain operations, relative error."""
    heads, kv_heads, dim = (8, 2, 32) if subject.is_small else (32, 8, 128)
    pool = PagedPool(KvShape(1, kv_heads, dim, subject.dtype, subject.device), 24 * 512)
    pool.layers[0].normal_()
    planner = Planner(pool)
    for length, parents in (
        (0, [-1, 0, 1, 2]),
        (200, [-1, 0, 0, 1, 1]),
        (510, [-1, 0, 1, 2, 1]),
        (1000, [-1, 0, 1, 2, 3]),
        (4090, [-1]),
    ):
        cache = PagedCache(pool)
        cache.reserve(length + len(parents))
        cache.length = length
        depths = [0] * len(parents)
        for node, parent in enumerate(parents):
            depths[node] = 0 if parent < 0 else depths[parent] + 1
        planner.add(CheckedInput(cache, [1] * len(parents), parents, depths, []))
    sizes, packed = planner.finish(exact=False)
    plan = unpack(sizes, upload(packed, subject.device))
    if sizes.copies:
        pool.layers[0].index_copy_(1, plan.copy_to, pool.layers[0].index_select(1, plan.copy_from))
    query = torch.randn(sizes.rows, heads, dim, dtype=subject.dtype, device=subject.device)
    count = len(planner.token_ids)
    plain = PagedAttention(False, dim**-0.5)(query, pool.layers[0], plan, None)[:count].float()
    exact_kv, exact_query = pool.layers[0].double(), query.double()
    exact = PagedAttention(False, dim**-0.5)(exact_query, exact_kv, plan, None)[:count].float()
    facts = [("plain operations, relative error", f"{_error(plain, exact):.2g}")]
    if subject.device.type == "cuda" and subject.use_kernel is not False:
        kernel = PagedAttention(True, dim**-0.5)(query, pool.layers[0], plan, None)[:count].float()
        facts.append(("kernel, relative error", f"{_error(kernel, exact):.2g}"))
        assert _error(kernel, exact) < 0.02, facts
    assert _error(plain, exact) < 0.02, facts
    return facts


def noise(subject: Subject) -> Facts:
    """Hashes bit by bit, Gumbel noise in ulp, and sampled ids of equal logits, device against CPU."""
    size = 2000 if subject.is_small else 128_256
    ids = torch.arange(size)
    most_ulp, eps = 0.0, torch.finfo(torch.float64).eps
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        for position in (0, 1, 1000, 2**31):
            here = hash32(seed, position, ids)
            there = hash32(seed, position, ids.to(subject.device)).cpu()
            assert torch.equal(here, there), f"hashes differ at seed {seed}, position {position}"
            ours = gumbel(seed, position, ids)
            other = gumbel(seed, position, ids.to(subject.device)).cpu()
            most_ulp = max(most_ulp, float(((ours - other).abs() / (ours.abs().clamp_min(1.0) * eps)).max()))
    # Each of both may be 2 ulp from the exact value.
    assert most_ulp <= 4.0, f"noise differs by {most_ulp} ulp"
    rows = (torch.randn(24, size, generator=torch.Generator().manual_seed(1)) * 3).to(torch.bfloat16).float()
    sampler = Sampler(size, frozenset())
    wrong = 0
    for repeat in range(4):
        specs = [
            RowSpec(
                SamplingParams(seed=row, **FILTERS[row % len(FILTERS)]), row + 100 * repeat, History([1, 2], [3, 3])
            )
            for row in range(len(rows))
        ]
        found = BatchSampler(sampler).draw(rows.to(subject.device), specs)
        for row, spec, drawn in zip(rows, specs, found, strict=True):
            wrong += drawn.token_id != sampler.sample(row, spec.params, spec.position, spec.history)
        subject.tick()
    assert wrong == 0, f"{wrong} of {4 * len(rows)} sampled ids differ from the CPU's"
    return [("largest difference of noise", f"{most_ulp:.2f} ulp"), ("sampled ids equal", f"{4 * len(rows)}")]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
