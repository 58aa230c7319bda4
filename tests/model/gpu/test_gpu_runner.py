"""The accelerator's runner on the CPU: logits as of a pass without a cache, over pages, trees, batches and rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moot.core.errors import ModelRefused
from moot.model.backend import plain_runner
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.gpu.pool import PagedCache
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import distance, path_to, plain_logits, plain_model, random_ids, rows_of, run_chunks

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-5
"""The root-mean-square norms of transformers compute in float32, whatever the model's own format."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", context=20_000)
    return load_model(path, dtype="float64", lean=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "windowed"])
def test_families_and_chunks_over_page_borders(tmp_path: Path, family: str) -> None:
    """Chunks that end before, at and after a border of pages give the logits of a pass without a cache."""
    window = {"sliding_window": 700} if family == "windowed" else {}
    kind = "mistral" if family == "windowed" else family
    path = make_tiny_model(tmp_path, kind, context=2048, dtype=torch.float64, **window)
    runner = GpuRunner(load_model(path, dtype="float64", lean=False), 2048, False, use_graphs=family != "llama")
    token_ids = random_ids(1100)
    logits, cache = run_chunks(runner, token_ids, [300, 212, 1, 510, 3])
    assert distance(logits, plain_logits(plain_model(path, "float64"), token_ids)) < CLOSE
    cache.free()
    assert runner.pool.used_tokens == 0


@pytest.mark.parametrize("length", [3, 505, 512, 1021])
def test_every_path_of_a_tree_is_a_chain(loaded: LoadedModel, length: int) -> None:
    """Trees before, at and across page borders: each node sees its own path, and what is kept is what was accepted."""
    runner = GpuRunner(loaded, 4096, False, use_graphs=length != 3)
    text = random_ids(length)
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 7, 8, 8, 4, 11, -1, 13]
    ids = random_ids(len(parents), seed=1)
    cache = run_chunks(runner, text, [])[1]
    logits = rows_of(runner, cache, ids, parents)
    straight = run_chunks(runner, text, [])[1]
    for node in range(len(ids)):
        chain = rows_of(runner, straight, [ids[one] for one in path_to(node, parents)])
        straight.commit(())
        assert distance(logits[node], chain[-1]) < 1e-12
    straight.free()
    kept = [0, 1, 3, 6, 7, 8, 10]
    cache.commit(kept)
    whole, other = run_chunks(runner, [*text, *(ids[node] for node in kept), 7], [])
    assert distance(rows_of(runner, cache, [7])[0], whole[-1]) < 1e-12
    cache.free()
    other.free()
    assert runner.pool.used_tokens == 0


def test_contexts_of_more_than_one_wave_of_pages(tmp_path: Path) -> None:
    """More than 16 pages before a row's own are attended to in several portions."""
    path = make_tiny_model(tmp_path, "llama", layers=1, hidden=16, context=20_000, num_key_value_heads=1)
    runner = GpuRunner(load_model(path, dtype="float64", lean=False), 20 * 512, False, use_graphs=True)
    token_ids = random_ids(17 * 512 + 30)
    cache = runner.new_cache()
    for start in range(0, len(token_ids), 2048):
        chunk = token_ids[start : start + 2048]
        (logits,) = runner.forward([SequenceInput(cache, chunk, None, [len(chunk) - 1])])
        cache.commit(range(len(chunk)))
    assert distance(logits[0], plain_logits(plain_model(path, "float64"), token_ids)[-1]) < CLOSE


def test_blocks_crops_and_preemption(loaded: LoadedModel) -> None:
    """What is read from one cache and appended to another, cropped in between, or computed again after `free`, goes on
    the same; a tree's accepted tokens are in place before anybody reads them."""
    runner = GpuRunner(loaded, 8 * 512, False)
    text = random_ids(600)
    expected, first = run_chunks(runner, [*text, 5, 9, 7], [])
    first.free()
    cache = run_chunks(runner, text, [])[1]
    runner.forward([SequenceInput(cache, [5, 6, 8, 9], [-1, 0, 1, 0], [])])
    cache.commit([0, 3])
    moved = runner.new_cache()
    moved.append_block(cache.read_block(0, 512))
    moved.append_block(cache.read_block(512, 602))
    for one in (cache, moved):
        assert distance(rows_of(runner, one, [7])[0], expected[-1]) < 1e-12
    cache.crop(510)
    assert cache.num_slots == 1024
    runner.forward([SequenceInput(cache, [*text[510:], 5, 9], None, [])])
    cache.commit(range(92))
    cache.wipe()
    assert distance(rows_of(runner, cache, [7])[0], expected[-1]) < 1e-12
    cache.free()
    moved.free()
    assert runner.pool.used_tokens == 0
    again = run_chunks(runner, [*text, 5, 9, 7], [100])[0]
    assert distance(again[-1], expected[-1]) < 1e-12


def test_slots_that_nobody_uses_may_hold_anything(loaded: LoadedModel) -> None:
    """Pages come back with what others left in them, and a weight of 0 times NaN would be NaN: chunks, a page's border
    and a tree in pages full of NaN give what they give in fresh ones."""
    text, tree = random_ids(520), [-1, 0, 1, 0]
    found = []
    for left in (0.0, torch.nan):
        runner = GpuRunner(loaded, 8 * 512, False, use_graphs=False)
        for layer in runner.pool.layers:
            layer.fill_(left)
        logits, cache = run_chunks(runner, text, [300, 1])
        found.append(torch.cat((logits, rows_of(runner, cache, [5, 6, 8, 9], tree))))
    assert torch.equal(*found)


def test_batch_invariant_rows_do_not_depend_on_their_company(tmp_path: Path) -> None:
    """In batch-invariant mode chunks, batch-mates and trees change no bit."""
    path = make_tiny_model(tmp_path, "llama", context=640)
    runner = GpuRunner(load_model(path, dtype="float32", lean=False), 16 * 512, True)
    text = random_ids(620)
    whole, cache = run_chunks(runner, text, [])
    cache.free()
    for sizes in ([1, 500, 11], [512, 3, 3], [64] * 9, [500, *[1] * 20]):
        logits, cache = run_chunks(runner, text, sizes)
        assert torch.equal(logits, whole)
        cache.free()
    batch, caches = [], []
    for index in range(5):
        length = 600 - 37 * index
        caches.append(run_chunks(runner, text[:length], [])[1])
        ids, parents = [text[length], 3, text[length + 1], text[length + 2]], [-1, 0, 0, 2]
        batch.append(SequenceInput(caches[-1], ids, parents, [0, 2, 3]))
    for index, logits in enumerate(runner.forward(batch)):
        length = 600 - 37 * index
        assert torch.equal(logits, whole[length : length + 3])


def test_other_families_are_refused_with_a_reason(tmp_path: Path) -> None:
    """A model that the lean pass does not know is refused, so that ModelRunner can take it."""
    loaded = load_model(make_tiny_model(tmp_path, "gpt_neox"), dtype="float32", lean=False)
    with pytest.raises(ModelRefused, match="gpt_neox"):
        GpuRunner(loaded, 512, False)


def test_caches_of_another_runner_are_refused(loaded: LoadedModel) -> None:
    """A cache that does not lie in pages cannot be read as if it did."""
    runner = GpuRunner(loaded, 1024, False)
    assert isinstance(runner.new_cache(), PagedCache)
    with pytest.raises(TypeError):
        rows_of(runner, plain_runner(loaded, 512, False).new_cache(), [1])
