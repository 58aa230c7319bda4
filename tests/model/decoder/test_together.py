"""Attention of several requests in one call gives each of them, bit by bit, what a call of its own gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moot.model.backend import plain_runner
from moot.model.cache.contiguous import KvPool, SequenceCache
from moot.model.checks import selfcheck
from moot.model.decoder import products, tiles
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel, load_model
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import random_ids, run_chunks

pytestmark = pytest.mark.skipif(
    not products.can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no bfloat16 products of oneDNN"
)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "mistral": {"sliding_window": 24},
}


@pytest.fixture(scope="module", params=CONFIGS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    # With several threads work is split at other places; one for the rest keeps the suite short.
    torch.set_num_threads(2 if request.param == "mistral" else 1)
    path = make_tiny_model(tmp_path_factory.mktemp("model"), request.param, context=700, **CONFIGS[request.param])
    yield load_model(path, dtype="bfloat16", native=False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runner(loaded: LoadedModel) -> ModelRunner:
    found = plain_runner(loaded, 512 * 200, True)
    # Where this does not hold requests are computed one by one, and there is nothing to compare.
    if not found.rules.together:
        pytest.skip("on this machine attention of several requests in one call rounds otherwise")
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often a call took so many slabs, of which so many had a part in the step."""
    counted: Counter[tuple[int, int]] = Counter()
    plan = tiles.plan_rounds

    def counting(segments: Any, *rest: Any) -> Any:
        found = plan(segments, *rest)
        for call in (call for each in found for call in each.calls):
            counted[call.num_slabs, len(call.members)] += 1
        return found

    monkeypatch.setattr(tiles, "plan_rounds", counting)
    return counted


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to `node`; none for -1."""
    path = []
    while node != -1:
        path.insert(0, node)
        node = parents[node]
    return path


class Twins:
    """The same requests twice: side by side and together, and with memory of their own and one by one."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.rules = {True: runner.rules, False: replace(runner.rules, together=False)}
        self.plain_pool = KvPool(runner.pool.shape, runner.pool.capacity_tokens)
        self.live: list[tuple[SequenceCache, SequenceCache]] = []

    def open(self, token_ids: list[int]) -> None:
        pair = self.runner.new_cache(), SequenceCache(self.plain_pool)
        self.live.append(pair)
        if token_ids:
            self.step([(pair, token_ids, None)], [len(token_ids)])

    def step(self, work: list[tuple[tuple[SequenceCache, SequenceCache], list[int], Any]], kept: list[Any]) -> None:
        results = []
        for place, is_together in enumerate((True, False)):
            self.runner.rules = self.rules[is_together]
            inputs = [SequenceInput(pair[place], ids, parents, range(len(ids))) for pair, ids, parents in work]
            results.append(self.runner.forward(inputs))
            for (pair, _, _), keep in zip(work, kept, strict=True):
                pair[place].commit(range(keep) if isinstance(keep, int) else keep)
        self.runner.rules = self.rules[True]
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)

    def close(self, pair: tuple[SequenceCache, SequenceCache]) -> None:
        self.live.remove(pair)
        assert torch.equal(pair[0].read_block(0, pair[0].length), pair[1].read_block(0, pair[1].length))
        for cache in pair:
            cache.free()


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_requests_changes_no_bit(runner: ModelRunner, calls: Counter[tuple[int, int]], seed: int) -> None:
    """Requests of any length with any number of rows, growing over two spans' ends, ending, moving and coming back:
    logits and caches are those of one by one, bit by bit, with gaps between the slabs and without."""
    draw, twins = random.Random(seed), Twins(runner)
    for index in range(24):
        twins.open(random_ids(draw.choice((1, 3, 200, 240, 250, 255, 256, 500, 505)), seed=index))
    for round_index in range(25):
        part = draw.sample(twins.live, draw.randrange(2, len(twins.live) + 1))
        same, trees = draw.choice((0, 0, 1, 5)), draw.choice((0, 0.1, 0.5, 1))
        work: list[Any] = []
        kept: list[Any] = []
        for pair in part:
            room = 690 - pair[0].length
            count = min(room, same or draw.choice((1, 2, 3, 4, 7, 9, 16, 17, 40)))
            parents = None
            if draw.random() < trees and count >= 3:
                parents = [-1, *(draw.choice((node - 1, draw.randrange(-1, node))) for node in range(1, count))]
            work.append((pair, random_ids(count, seed=draw.randrange(1000)), parents))
            kept.append(draw.randrange(count + 1) if parents is None else path_to(draw.randrange(-1, count), parents))
        twins.step(work, kept)
        for pair in list(twins.live):
            fate = draw.random()
            if fate < 0.04 or pair[0].length > 640:
                twins.close(pair)
                twins.open(random_ids(draw.randrange(1, 300), seed=round_index))
            elif fate < 0.07:
                # Preempted: what was committed comes back as a block, into whatever slab is free then.
                for cache in pair:
                    block = cache.read_block(0, cache.length)
                    cache.free()
                    cache.append_block(block)
            elif fate < 0.09:
                for cache in pair:
                    cache.crop(cache.length // 2)
    for pair in list(twins.live):
        twins.close(pair)
    assert runner.pool.used_tokens == 0
    assert runner.pool.arena is not None
    assert runner.pool.arena.num_chunks == 0
    assert sum(calls.values()) > 30
    assert any(size == members for size, members in calls)
    assert any(size > members for size, members in calls)
    assert len({size for size, _ in calls}) > 4


def test_sixty_four_requests_are_one_call(runner: ModelRunner, calls: Counter[tuple[int, int]]) -> None:
    """Equal numbers of rows in neighbouring slabs need one call a layer, and two chunks need two."""
    twins = Twins(runner)
    for index in range(64):
        twins.open(random_ids(9 + index, seed=index))
    calls.clear()
    for rows in (1, 5):
        twins.step([(pair, random_ids(rows, seed=3), None) for pair in twins.live], [rows] * 64)
    assert calls == {(64, 64): 2}
    for pair in list(twins.live):
        twins.close(pair)


def test_poison_stays_in_its_slab(runner: ModelRunner, calls: Counter[tuple[int, int]]) -> None:
    """NaN in a neighbour of the same call, in a slab that a call reaches over, and in a slab that its successor has
    taken, reaches nobody."""
    prompts = [random_ids(20, seed=index) for index in range(4)]
    expected = [run_chunks(runner, prompt, [17])[0] for prompt in prompts]
    caches = [run_chunks(runner, prompt, [])[1] for prompt in prompts]
    for cache in caches:
        cache.crop(17)
    with torch.inference_mode():
        caches[1].data.fill_(float("nan"))

    def step(part: tuple[int, ...]) -> None:
        inputs = [SequenceInput(caches[index], prompts[index][17:], None, range(3)) for index in part]
        for index, logits in zip(part, runner.forward(inputs), strict=True):
            assert logits.isnan().all() if index == 1 else torch.equal(logits, expected[index][17:])

    calls.clear()
    step((0, 1, 2, 3))
    step((3, 0, 2))
    assert calls == {(4, 4): 1, (4, 3): 1}
    place = caches[1].slab
    caches[1].free()
    _, successor = run_chunks(runner, prompts[1][:17], [])
    assert place is not None
    assert successor.slab is not None
    assert successor.slab.index == place.index
    inputs = [
        SequenceInput(cache, prompts[index][17:], None, range(3)) for index, cache in ((0, caches[0]), (1, successor))
    ]
    for index, logits in enumerate(runner.forward(inputs)):
        assert torch.equal(logits, expected[index][17:])
    for cache in (*caches, successor):
        cache.free()


def test_products_that_depend_on_their_number_are_noticed(
    loaded: LoadedModel, calls: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a batch of products sums in another order than few of them, requests are computed one by one."""
    plain = torch.bmm

    def two_kernels(left: Tensor, right: Tensor) -> Tensor:
        if left.shape[0] < 5 * loaded.kv_shape.num_kv_heads:
            return plain(left, right)
        half = left.shape[2] // 2
        return plain(left[..., :half], right[:, :half]) + plain(left[..., half:], right[:, half:])

    monkeypatch.setattr(torch, "bmm", two_kernels)
    assert not selfcheck.find_rules(loaded).together
    runner = plain_runner(loaded, 512 * 20, True)
    prompt = random_ids(30)
    expected, first = run_chunks(runner, prompt, [25])
    caches = [run_chunks(runner, prompt[:25], [])[1] for _ in range(8)]
    for logits in runner.forward([SequenceInput(cache, prompt[25:], None, range(5)) for cache in caches]):
        assert torch.equal(logits, expected[25:])
    assert not calls
    for cache in (first, *caches):
        cache.free()


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_of_kinds_that_were_checked(runner: ModelRunner, seed: int) -> None:
    """However the slabs of a step lie: sizes and rows are on the lists, calls stay in the chunk, each tile once."""
    draw = random.Random(seed)
    most = draw.choice((1, 4, 40))
    caches = [runner.new_cache() for _ in range(draw.randrange(2, 100))]
    for cache in caches:
        cache.reserve(draw.choice((250, 500, 690)))
    part = draw.sample(caches, draw.randrange(2, len(caches) + 1))
    inputs = []
    for cache in part:
        count = draw.randrange(1, most + 1)
        parents = [-1, *(draw.randrange(-1, node) for node in range(1, count))] if draw.random() < 0.5 else None
        inputs.append(SequenceInput(cache, random_ids(count), parents, ()))
        # As if it held all but the last few of its slots.
        cache.length = cache.data.shape[2] - most - 1 if cache.data.shape[2] < 700 else 640
    segments, token_ids, _, _ = runner._plan(inputs)
    trees = {id(segment) for segment in segments if not segment.is_chain}
    decoder = runner.loaded.decoder
    assert decoder is not None
    tiles_seen = []
    for each in tiles.plan_rounds(segments, len(token_ids), decoder.weights.heads, runner.rules):
        tiles_seen += [id(tile) for _, tile in each.alone]
        seen = [id(segment) for segment, _ in each.alone]
        for call in each.calls:
            assert call.num_slabs in tiles.SIZES
            assert call.num_rows in tiles.ROWS
            assert call.first >= 0
            assert call.first + call.num_slabs <= call.chunk.num_slabs
            assert len(call.members) > 1
            tiles_seen += [id(member.tile) for member in call.members]
            seen += [id(member.segment) for member in call.members]
        # Two tiles of one tree would take the same slots.
        assert all(count == 1 for segment, count in Counter(seen).items() if segment in trees)
    assert sorted(tiles_seen) == sorted(id(tile) for segment in segments for tile in segment.tiles)
    for cache in caches:
        cache.free()
