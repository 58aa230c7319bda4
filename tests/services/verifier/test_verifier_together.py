"""Path equality where requests share calls: the lean pass in bfloat16, with the attention of several in one call."""

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
from moot.model.decoder import products, tiles
from services.verifier.engine import Engine
from tests.services.verifier.verifier_driver import Case, MakeEngine, coverage, draw_case, make_suite

pytestmark = pytest.mark.skipif(
    not products.can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no bfloat16 products of oneDNN"
)

NUM_CASES = int(os.environ.get("MOOT_CASES", "4000"))
BLOCK = 200


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many chains and paths of trees were computed in calls for several requests."""
    counted: Counter[str] = Counter()
    plan = tiles.plan_rounds

    def counting(*arguments: Any) -> Any:
        found = plan(*arguments)
        for number, each in enumerate(found):
            for call in each.calls:
                assert len(call.members) > 1
                for member in call.members:
                    counted["chain" if member.tile.path is None else "tree"] += 1
                counted["later_path"] += number > 0
                counted["gap"] += call.num_slabs > len(call.members)
        return found

    monkeypatch.setattr(tiles, "plan_rounds", counting)
    return counted


def long_or_short(seed: int) -> Case:
    """A case as ever, or one whose text passes from one page of slots to the next."""
    case, draw = draw_case(seed), random.Random(seed + 3)
    if draw.random() < 0.5:
        return case
    before = PAGE_SLOTS - draw.randrange(1 + case.params.max_tokens)
    filler = tuple(draw.randrange(256) for _ in range(before - len(case.prompt)))
    return replace(case, prompt=filler + case.prompt)


def _watch(engine: Engine, preempted: list[Any]) -> None:
    """Note who loses its slots."""
    rearrange = engine.serving.scheduler.rearrange

    def watched() -> Any:
        changes = rearrange()
        preempted.extend(changes.preempted)
        return changes

    engine.serving.scheduler.rearrange = watched  # type: ignore[method-assign]


def check(make_engine: MakeEngine, seen: Counter[str], seeds: Sequence[int]) -> None:
    """Plain texts with a call for each request's attention; then drafted ones, several in one call: of a wide pool, and
    of one so small that requests lose their slots and get others."""
    options: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "max_num_seqs": 32, "prefix_cache_tokens": 0}
    plain = make_engine(**options)
    if not plain.runner.rules.together:
        pytest.skip("on this machine attention of several requests in one call rounds otherwise")
    plain.runner.rules = replace(plain.runner.rules, together=False)
    suite = make_suite(plain, seeds, long_or_short)
    assert all(one.failure is None for one in suite.plain)
    assert not seen
    preempted: list[Any] = []
    happened: Counter[str] = Counter()
    for pages in (64, 16):
        engine = make_engine(pages=pages, **options)
        assert engine.runner.rules.together
        _watch(engine, preempted)
        wrong, results = suite.compare(engine, at_once=24)
        assert wrong == []
        happened += coverage(suite, results)
    assert preempted
    assert seen["chain"] > len(seeds), seen
    assert seen["tree"] > len(seeds) // 4, seen
    assert seen["later_path"], seen
    assert seen["gap"], seen
    wanted = ["accepted_0", "accepted_3", "accepted_later_sibling", "all_accepted", "greedy", "sampled"]
    assert all(happened[name] for name in wanted), happened


def test_any_draft_leaves_the_text_unchanged(make_engine: MakeEngine, seen: Counter[str]) -> None:
    """80 drawn cases, 24 at once: chains, trees, every K, late and malicious drafts, aborts, moves, preemption."""
    check(make_engine, seen, range(60_000, 60_080))


@pytest.mark.long
@pytest.mark.parametrize("block", range(max(1, NUM_CASES // BLOCK)))
def test_any_draft_leaves_the_text_unchanged_in_many_more_cases(
    make_engine: MakeEngine, seen: Counter[str], block: int
) -> None:
    """The same with MOOT_CASES cases (4,000 unless set), other ones than above."""
    check(make_engine, seen, range(70_000 + block * BLOCK, 70_000 + (block + 1) * BLOCK))
