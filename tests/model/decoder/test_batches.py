"""A step of several requests gives each of them, bit by bit, what a step of its own gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moot.model.backend import plain_runner
from moot.model.cache.kv_cache import KvCache
from moot.model.decoder.kernels.library import VARIANTS
from moot.model.decoder.products import can_pack
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import load_by_kernels, path_to, random_ids, run_chunks, threads

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "mistral": {"sliding_window": 24, "head_dim": 32},
}


@pytest.fixture(
    scope="module",
    params=[(family, variant) for family in CONFIGS for variant in (*VARIANTS, None)],
    ids=[f"{family}-{name}" for family in CONFIGS for name in (*(each.name for each in VARIANTS), "torch")],
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """By each variant of the kernels, and by torch."""
    family, variant = request.param
    path = make_tiny_model(tmp_path_factory.mktemp("model"), family, context=700, **CONFIGS[family])
    # With several threads work is split at other places; one for the rest keeps the suite short.
    with threads(2 if family == "mistral" else 1):
        if variant is not None:
            loaded = load_by_kernels(path, variant.name)
        elif can_pack(torch.bfloat16, torch.device("cpu")):
            loaded = load_model(path, dtype="bfloat16", native=False)
        else:
            pytest.skip("this CPU has no bfloat16 products of oneDNN")
        assert loaded.decoder is not None
        assert (loaded.decoder.kernels is None) == (variant is None)
        yield plain_runner(loaded, 512 * 200, True)


class Twins:
    """The same requests twice: all in one step, and each in steps of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.live: list[tuple[KvCache, KvCache]] = []

    def open(self, token_ids: list[int]) -> None:
        pair = self.runner.new_cache(), self.runner.new_cache()
        self.live.append(pair)
        self.step([(pair, token_ids, None)], [len(token_ids)])

    def step(self, work: list[tuple[tuple[KvCache, KvCache], list[int], Any]], kept: list[Any]) -> None:
        batched = [SequenceInput(pair[0], ids, parents, range(len(ids))) for pair, ids, parents in work]
        apart = [SequenceInput(pair[1], ids, parents, range(len(ids))) for pair, ids, parents in work]
        for one, own in zip(self.runner.forward(batched), apart, strict=True):
            assert torch.equal(one, self.runner.forward([own])[0])
        for (pair, _, _), keep in zip(work, kept, strict=True):
            for cache in pair:
                cache.commit(range(keep) if isinstance(keep, int) else keep)

    def close(self, pair: tuple[KvCache, KvCache]) -> None:
        self.live.remove(pair)
        assert torch.equal(pair[0].read_block(0, pair[0].length), pair[1].read_block(0, pair[1].length))
        for cache in pair:
            cache.free()


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_requests_changes_no_bit(runner: ModelRunner, seed: int) -> None:
    """Requests of any length with any number of rows, chains and trees, growing over two spans' ends, ending, moving
    and coming back: logits and caches are those of one by one, bit by bit."""
    draw, twins = random.Random(seed), Twins(runner)
    for index in range(12):
        twins.open(random_ids(draw.choice((1, 3, 200, 240, 250, 255, 256, 500, 505)), seed=index))
    for round_index in range(12):
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
                # Preempted: what was committed comes back as a block.
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


def test_poison_stays_in_its_request(runner: ModelRunner) -> None:
    """NaN in one request's cache reaches nobody beside it, in whatever order."""
    prompts = [random_ids(20, seed=index) for index in range(4)]
    expected = [run_chunks(runner, prompt, [17])[0] for prompt in prompts]
    caches = [run_chunks(runner, prompt, [])[1] for prompt in prompts]
    for cache in caches:
        cache.crop(17)
    with torch.inference_mode():
        caches[1].data.fill_(float("nan"))
    for part in ((0, 1, 2, 3), (3, 1, 0)):
        inputs = [SequenceInput(caches[index], prompts[index][17:], None, range(3)) for index in part]
        for index, logits in zip(part, runner.forward(inputs), strict=True):
            assert logits.isnan().all() if index == 1 else torch.equal(logits, expected[index][17:])
    for cache in caches:
        cache.free()
