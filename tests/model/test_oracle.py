"""The runner against transformers' own forward pass without a cache, which shares no code with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.testing.tiny_model import FAMILIES, make_tiny_model
from tests.model.driving import (
    assert_is_the_plain_pass,
    distance,
    plain_and_half,
    plain_logits,
    plain_model,
    random_ids,
    run_chunks,
)

pytestmark = pytest.mark.usefixtures("one_thread")


BOUNDS = {"float32": 5e-6, "float64": 1e-12}


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_plain_forward(tmp_path: Path, family: str, dtype: str, batch_invariant: bool) -> None:
    """Chunks of any size, over a page border, give the plain forward's logits for every family."""
    path = make_tiny_model(tmp_path, family)
    token_ids = random_ids(530)
    runner = plain_runner(load_model(path, dtype=dtype), 2048, batch_invariant)
    logits, _ = run_chunks(runner, token_ids, [1, 2, 40, 460, 5, 9])
    # Where scores are capped, the plain forward takes its softmax in float32 in every dtype.
    bound = BOUNDS["float32" if family == "gemma2" else dtype]
    assert distance(logits, plain_logits(plain_model(path, dtype), token_ids)) < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_the_plain_forward(tmp_path: Path, family: str) -> None:
    """Token by token from the cache, the text is the one that a pass over everything per token writes."""
    path = make_tiny_model(tmp_path, family, seed=3)
    runner, plain = plain_runner(load_model(path, dtype="float64"), 1024, True), plain_model(path, "float64")
    cache, pending = runner.new_cache(), random_ids(20, seed=5)
    text, ours = list(pending), []
    for _ in range(30):
        (logits,) = runner.forward([SequenceInput(cache, pending, None, [len(pending) - 1])])
        cache.commit(range(len(pending)))
        pending = [int(logits[0].argmax())]
        ours += pending
    for token in ours:
        assert token == int(plain_logits(plain, text)[-1].argmax())
        text.append(token)


AWKWARD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"intermediate_size": 100}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden": 48, "attention_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("gpt_neox", {"use_parallel_residual": False}),
]


@pytest.mark.parametrize(("family", "config"), AWKWARD)
def test_unusual_shapes_and_windows(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """Odd widths, one KV head, biases, scaled positions and sliding windows are computed, not approximated."""
    assert_is_the_plain_pass(make_tiny_model(tmp_path, family, **config))


def test_half_precision_stays_near(tmp_path: Path) -> None:
    """In bfloat16 the runner is as near to the float32 truth as transformers' own pass is (within a factor of 1.5)."""
    path = make_tiny_model(tmp_path, "llama", layers=4)
    token_ids = random_ids(100)
    truth, theirs = plain_and_half(path, token_ids)
    logits, _ = run_chunks(plain_runner(load_model(path, dtype="bfloat16"), 1024, True), token_ids, [7, 1, 50])
    assert (logits - truth).norm() < 1.5 * theirs
