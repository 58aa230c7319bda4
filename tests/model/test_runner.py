"""Rounds at the runner's level, plain and paged: accepted, rejected and failed drafts, batches, limits, poison."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from moot.core.errors import ContextLengthExceeded, NoCapacity
from moot.model.backend import plain_runner
from moot.model.cache.kv_cache import KvCache
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel, load_model
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import distance, plain_logits, plain_model, random_ids, rows_of, run_chunks

Make = Callable[[LoadedModel, int, bool], ModelRunner]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", context=640)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype="float32")


@pytest.fixture(params=["plain", "paged"])
def make(request: pytest.FixtureRequest) -> Make:
    """Of a loaded model, room for so many tokens and the mode: the runner of a CPU, or that of accelerators."""

    def paged(loaded: LoadedModel, capacity: int, batch_invariant: bool) -> ModelRunner:
        return GpuRunner(loaded, capacity, batch_invariant, use_graphs=not batch_invariant)

    return plain_runner if request.param == "plain" else paged


def test_c05_rejections_leave_no_trace(path: Path, loaded: LoadedModel) -> None:
    """A rejection forced at each position 0..K for a hundred rounds, some rounds failing between forward and commit:
    the logits stay those of a pass without a cache over what was accepted."""
    runner, plain, draw = plain_runner(loaded, 2048, True), plain_model(path, "float32"), random.Random(0)
    cache, text, num_draft = runner.new_cache(), random_ids(5), 4
    pending = list(text)
    for round_index in range(100):
        draft = [draw.randrange(259) for _ in range(num_draft)]
        rows = range(len(pending) - 1, len(pending) + num_draft)
        batch = [SequenceInput(cache, pending + draft, None, rows)]
        if round_index % 7 == 0:
            runner.forward([SequenceInput(cache, pending + draft[::-1], None, [0])])
        (logits,) = runner.forward(batch)
        accepted = round_index % (num_draft + 1)
        if round_index % 20 < 5 or accepted == num_draft:
            expected = plain_logits(plain, text + draft)[len(text) - 1 :]
            assert distance(logits, expected) < 5e-6
        cache.commit(range(len(pending) + accepted))
        assert cache.length == len(text) + accepted
        pending = [draw.randrange(259)]
        text += draft[:accepted] + pending
    cache.free()
    assert runner.pool.used_tokens == 0


@pytest.mark.parametrize(
    ("make", "mode"), [("plain", True), ("plain", False), ("paged", True), ("paged", False)], indirect=["make"]
)
def test_c04_batch_of_32_with_different_acceptance(make: Make, loaded: LoadedModel, mode: bool) -> None:
    """32 requests (of pages, 8), half of them near a page's border, with K of 0, 3 and 7, chains and trees, accepting
    different lengths; after each round one ends and its room goes to a new one: each is as it is alone."""
    num_requests = 32 if make is plain_runner else 8
    runner = make(loaded, num_requests * 1024 * 2, mode)
    lengths = [500 + 3 * index if index % 2 else 3 + 5 * index % 37 for index in range(num_requests)]
    pairs = [(runner.new_cache(), runner.new_cache()) for _ in lengths]
    for pair, length in zip(pairs, lengths, strict=True):
        begin(runner, pair, random_ids(length, seed=length))
    for round_index in range(4):
        inputs: list[tuple[list[int], list[int] | None]] = []
        for index in range(num_requests):
            count = 1 + (0, 3, 7)[(index + round_index) % 3]
            tree = [-1, *[max(0, node - 2) for node in range(1, count)]] if index % 4 == 0 else None
            inputs.append((random_ids(count, seed=100 * round_index + index), tree))
        batch = [
            SequenceInput(pair[0], ids, tree, range(len(ids))) for pair, (ids, tree) in zip(pairs, inputs, strict=True)
        ]
        for index, logits in enumerate(runner.forward(batch)):
            ids, tree = inputs[index]
            own = rows_of(runner, pairs[index][1], ids, tree)
            assert torch.equal(own, logits) if mode else distance(own, logits) < 5e-6
            kept = range(1 + (index + round_index) % len(ids)) if tree is None else [0, 2][: 1 + (len(ids) > 2)]
            for cache in pairs[index]:
                cache.commit(kept)
        # In the other order: what one of them left to be moved must not reach the other, which has its room now.
        ended = pairs[4 * round_index % num_requests][::-1]
        for cache in ended:
            cache.free()
        begin(runner, ended, random_ids(40, seed=round_index))
    for pair in pairs:
        for cache in pair:
            cache.free()
    assert runner.pool.used_tokens == 0


def begin(runner: ModelRunner, caches: Iterable[KvCache], prompt: list[int]) -> None:
    for cache in caches:
        runner.forward([SequenceInput(cache, prompt, None, [])])
        cache.commit(range(len(prompt)))


def test_limits_are_refused_before_anything_changes(make: Make, loaded: LoadedModel) -> None:
    """The context limit counts positions, so a wide tree may pass where a chain of as many tokens may not."""
    runner = make(loaded, 1024, True)
    cache = run_chunks(runner, random_ids(638), [])[1]
    rows_of(runner, cache, [1, 2, 3, 4], [-1, 0, 0, 0])
    with pytest.raises(ContextLengthExceeded, match="641 tokens exceed the model's context of 640"):
        rows_of(runner, cache, [1, 2, 3])
    assert cache.length == 638
    assert rows_of(runner, cache, [1, 2]).isfinite().all()


def test_capacity_is_refused_and_the_rest_goes_on(make: Make, loaded: LoadedModel) -> None:
    """A request that does not fit gets NoCapacity; those that are in go on as if nothing had been asked."""
    runner = make(loaded, 512, True)
    cache = run_chunks(runner, random_ids(10), [])[1]
    with pytest.raises(NoCapacity):
        runner.forward([SequenceInput(one, [1], None, [0]) for one in (cache, runner.new_cache())])
    expected, _ = run_chunks(make(loaded, 512, True), [*random_ids(10), 7, 8, 9], [])
    assert torch.equal(rows_of(runner, cache, [7, 8, 9]), expected[10:])


def test_malformed_inputs_are_refused(make: Make, loaded: LoadedModel) -> None:
    """C07 and kin: ids outside the embeddings, parents that come later, rows that do not exist, a cache used twice,
    tokens kept that are no path. No input, no tokens and no wanted rows are steps like any other."""
    runner = make(loaded, 1024, False)
    cache = runner.new_cache()
    bad = [([300], None, [0]), ([-1], None, [0]), ([1, 2], [0, 0], [0]), ([1, 2], [-1], [0])]
    bad += [([1, 2], [-1, -2], [0]), ([1], None, [1])]
    for item in bad:
        with pytest.raises(ValueError, match=r"embeddings|parent|logit row"):
            runner.forward([SequenceInput(cache, *item)])
    with pytest.raises(ValueError, match="share a cache"):
        runner.forward([SequenceInput(cache, [1], None, [0])] * 2)
    assert cache.length == 0
    assert cache.pending is None
    assert runner.forward([]) == []
    assert runner.forward([SequenceInput(cache, [], None, [])])[0].shape == (0, 300)
    rows_of(runner, cache, [1, 2])
    with pytest.raises(ValueError, match="not a path"):
        cache.commit([1])
    assert runner.forward([SequenceInput(cache, [1, 2], None, [])])[0].shape == (0, 300)
    cache.commit([0, 1])
    assert cache.length == 2


def test_a_poisoned_request_fails_alone(make: Make, path: Path) -> None:
    """NaN in one request's numbers reaches no other request of the step, bit by bit, nor the one that gets its room."""
    loaded = load_model(path, dtype="float32")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[7] = float("nan")
    runner = make(loaded, 2048, True)
    healthy, sick = [1, 2, 3, 4], [5, 7, 6]
    expected, first = run_chunks(runner, healthy, [])
    first.free()
    for order in (0, 1):
        caches = runner.new_cache(), runner.new_cache()
        batch = [SequenceInput(caches[0], healthy, None, range(4))]
        batch.insert(order, SequenceInput(caches[1], sick, None, range(3)))
        logits = runner.forward(batch)
        assert logits[order].isnan()[1:].all()
        assert torch.equal(logits[1 - order], expected)
        caches[1].free()
        again, cache = run_chunks(runner, healthy, [])
        assert torch.equal(again, expected)
        cache.free()
        caches[0].free()


def test_progress_counts_every_layer_and_tile(loaded: LoadedModel) -> None:
    """The heartbeat moves with the work: at least once per layer, and more with more tiles."""
    runner = plain_runner(loaded, 2048, True)
    counts = []
    for size in (1, 32, 33, 320):
        count = 0

        def bump() -> None:
            nonlocal count
            count += 1

        runner.forward([SequenceInput(runner.new_cache(), random_ids(size), None, [0])], bump)
        counts.append(count)
    layers = loaded.kv_shape.num_layers
    assert layers <= counts[0] <= counts[1] < counts[2] < counts[3]
    assert counts[3] >= 10 * layers
