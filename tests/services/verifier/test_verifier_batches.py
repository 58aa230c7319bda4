"""Path equality in the numbers that are served, where many requests share a step: by each of the ways to compute it."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moot.model.cache.contiguous import PAGE_SLOTS
from moot.model.decoder.kernels.library import load_kernels
from moot.model.decoder.products import can_pack
from moot.shipped import cache_dir
from tests.services.verifier.verifier_driver import Case, MakeEngine, coverage, draw_case, make_suite, preempted_by

NUM_CASES = int(os.environ.get("MOOT_CASES", "4000"))
BLOCK = 200

# A model for each, because it is loaded once. Heads of 16 are computed by torch.
WAYS: dict[str, dict[str, Any]] = {
    "avx512": {"dtype": "bfloat16", "model": {"head_dim": 32}},
    "avx2": {"dtype": "bfloat16", "model": {"head_dim": 64}},
    "torch": {"dtype": "bfloat16"},
    "modules": {"dtype": "float32"},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name == "modules":
        return name
    if name == "torch":
        if not can_pack(torch.bfloat16, torch.device("cpu")):
            pytest.skip("this CPU has no bfloat16 products of oneDNN")
        return name
    monkeypatch.setenv("MOOT_KERNELS", name)
    if load_kernels(cache_dir()) is None:
        pytest.skip(f"no kernels: a CPU with {name}, and apt-get install gcc libc6-dev")
    return name


def long_or_short(seed: int) -> Case:
    """A case as ever, or one whose text passes from one page of slots to the next."""
    case, draw = draw_case(seed), random.Random(seed + 3)
    if draw.random() < 0.5:
        return case
    before = PAGE_SLOTS - draw.randrange(1 + case.params.max_tokens)
    filler = tuple(draw.randrange(256) for _ in range(before - len(case.prompt)))
    return replace(case, prompt=filler + case.prompt)


def check(make_engine: MakeEngine, way: str, seeds: Sequence[int]) -> None:
    """Plain texts; then drafted ones, many at once: of a wide pool, and of one so small that requests lose their slots
    and get others."""
    options: dict[str, Any] = {"batch_invariant": True, "max_num_seqs": 32, "prefix_cache_tokens": 0, **WAYS[way]}
    plain = make_engine(**options)
    assert way in plain.runner.way or (way in ("torch", "modules") and "kernels" not in plain.runner.way)
    suite = make_suite(plain, seeds, long_or_short)
    assert all(one.failure is None for one in suite.plain)
    happened: Counter[str] = Counter()
    for pages in (64, 16):
        engine = make_engine(pages=pages, **options)
        preempted = preempted_by(engine)
        wrong, results = suite.compare(engine, at_once=24)
        assert wrong == []
        happened += coverage(suite, results)
    assert preempted
    wanted = ["accepted_0", "accepted_3", "accepted_later_sibling", "all_accepted", "greedy", "sampled"]
    assert all(happened[name] for name in wanted), happened


def test_any_draft_leaves_the_text_unchanged(make_engine: MakeEngine, way: str) -> None:
    """80 drawn cases, 24 at once: chains, trees, every K, late and malicious drafts, aborts, moves, preemption."""
    check(make_engine, way, range(60_000, 60_080))


@pytest.mark.long
@pytest.mark.parametrize("block", range(max(1, NUM_CASES // BLOCK)))
def test_any_draft_leaves_the_text_unchanged_in_many_more_cases(make_engine: MakeEngine, way: str, block: int) -> None:
    """The same with MOOT_CASES cases (4,000 unless set), other ones than above."""
    check(make_engine, way, range(70_000 + block * BLOCK, 70_000 + (block + 1) * BLOCK))
