"""Rounds at the runner's level: accepted, rejected and failed drafts, batches, limits, poison."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moot.core.errors import ContextLengthExceeded, NoCapacity
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import distance, plain_logits, plain_model, random_ids, run_chunks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", context=640)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype="float32")


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


@pytest.mark.parametrize("mode", [True, False])
def test_c04_batch_of_32_with_different_acceptance(loaded: LoadedModel, mode: bool) -> None:
    """32 requests with K of 0, 3 and 7, chains and trees, accepting different lengths: each is as it is alone."""
    runner = plain_runner(loaded, 32 * 512 * 2, mode)
    prompts = [random_ids(3 + 5 * index % 37, seed=index) for index in range(32)]
    batched = [run_chunks(runner, prompt, [])[1] for prompt in prompts]
    alone = [run_chunks(runner, prompt, [])[1] for prompt in prompts]
    for round_index in range(4):
        inputs: list[tuple[list[int], list[int] | None]] = []
        for index in range(32):
            count = 1 + (0, 3, 7)[(index + round_index) % 3]
            tree = [-1, *[max(0, node - 2) for node in range(1, count)]] if index % 4 == 0 else None
            inputs.append((random_ids(count, seed=100 * round_index + index), tree))
        batch = [
            SequenceInput(cache, ids, tree, range(len(ids))) for cache, (ids, tree) in zip(batched, inputs, strict=True)
        ]
        for index, logits in enumerate(runner.forward(batch)):
            ids, tree = inputs[index]
            (own,) = runner.forward([SequenceInput(alone[index], ids, tree, range(len(ids)))])
            assert torch.equal(own, logits) if mode else distance(own, logits) < 5e-6
            if tree is None:
                kept = list(range(1 + (index + round_index) % len(ids)))
            else:
                kept = [0, *([2] if len(ids) > 2 else [])]
            batched[index].commit(kept)
            alone[index].commit(kept)
    for cache in batched + alone:
        cache.free()
    assert runner.pool.used_tokens == 0


def test_limits_are_refused_before_anything_changes(loaded: LoadedModel) -> None:
    """The context limit counts positions, so a wide tree may pass where a chain of as many tokens may not."""
    runner = plain_runner(loaded, 1024, True)
    cache = run_chunks(runner, random_ids(638), [])[1]
    runner.forward([SequenceInput(cache, [1, 2, 3, 4], [-1, 0, 0, 0], [3])])
    with pytest.raises(ContextLengthExceeded, match="641 tokens exceed the model's context of 640"):
        runner.forward([SequenceInput(cache, [1, 2, 3], None, [2])])
    assert cache.length == 638
    (logits,) = runner.forward([SequenceInput(cache, [1, 2], None, [1])])
    assert logits.isfinite().all()
    cache.free()


def test_capacity_is_refused_and_the_rest_goes_on(loaded: LoadedModel) -> None:
    """A request that does not fit gets NoCapacity; those that are in go on as if nothing had been asked."""
    runner = plain_runner(loaded, 512, True)
    cache = run_chunks(runner, random_ids(10), [])[1]
    with pytest.raises(NoCapacity):
        runner.forward([SequenceInput(cache, [1], None, [0]), SequenceInput(runner.new_cache(), [1], None, [0])])
    (logits,) = runner.forward([SequenceInput(cache, [7], None, [0])])
    expected, _ = run_chunks(plain_runner(loaded, 512, True), [*random_ids(10), 7], [])
    assert torch.equal(logits[0], expected[-1])


def test_malformed_inputs_are_refused(loaded: LoadedModel) -> None:
    """C07 and kin: ids outside the embeddings, parents that come later, rows that do not exist, a cache used twice."""
    runner = plain_runner(loaded, 1024, False)
    cache = runner.new_cache()
    bad = [
        SequenceInput(cache, [300], None, [0]),
        SequenceInput(cache, [-1], None, [0]),
        SequenceInput(cache, [1, 2], [0, 0], [0]),
        SequenceInput(cache, [1, 2], [-1], [0]),
        SequenceInput(cache, [1, 2], [-1, -2], [0]),
        SequenceInput(cache, [1], None, [1]),
    ]
    for item in bad:
        with pytest.raises(ValueError, match=r"embeddings|parent|logit row"):
            runner.forward([item])
    with pytest.raises(ValueError, match="share a cache"):
        runner.forward([SequenceInput(cache, [1], None, [0])] * 2)
    assert cache.length == 0
    assert cache.pending is None


def test_nothing_to_do(loaded: LoadedModel) -> None:
    """No input, no tokens and no wanted rows are steps like any other."""
    runner = plain_runner(loaded, 1024, True)
    cache = runner.new_cache()
    assert runner.forward([]) == []
    assert [list(logits.shape) for logits in runner.forward([SequenceInput(cache, [], None, [])])] == [[0, 300]]
    assert runner.forward([SequenceInput(cache, [1, 2], None, [])])[0].shape == (0, 300)
    cache.commit([0, 1])
    assert cache.length == 2


def test_a_poisoned_request_fails_alone(path: Path) -> None:
    """NaN in one request's numbers reaches no other request of the step, bit by bit."""
    loaded = load_model(path, dtype="float32")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[7] = float("nan")
    runner = plain_runner(loaded, 4096, True)
    healthy, sick = [1, 2, 3, 4], [5, 7, 6]
    expected, _ = run_chunks(runner, healthy, [])
    for order in (0, 1):
        batch = [SequenceInput(runner.new_cache(), healthy, None, range(4))]
        batch.insert(order, SequenceInput(runner.new_cache(), sick, None, range(3)))
        logits = runner.forward(batch)
        assert logits[order].isnan()[1:].all()
        assert torch.equal(logits[1 - order], expected)


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
