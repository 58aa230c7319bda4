"""The lean pass of known decoders: which models it takes, that its numbers are the model's, and what it checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moot.core.errors import ConfigError
from moot.model.backend import plain_runner
from moot.model.checks import selfcheck
from moot.model.decoder import products
from moot.model.inputs import SequenceInput
from moot.model.loading import llama_weights
from moot.model.loading.load import load_model
from moot.testing.tiny_model import FAMILIES, make_tiny_model
from tests.model.driving import distance, plain_and_half, plain_logits, plain_model, random_ids, run_chunks

pytestmark = [
    pytest.mark.skipif(
        not products.can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no bfloat16 products of oneDNN"
    ),
    pytest.mark.usefixtures("one_thread"),
]

KNOWN = ("llama", "qwen2", "qwen3", "mistral", "phi3")


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_only(tmp_path: Path, family: str) -> None:
    """Whatever is not known layer by layer is computed by transformers' modules, and says so in its fingerprint."""
    path = make_tiny_model(tmp_path, family)
    lean, modules = load_model(path, "cpu", "bfloat16"), load_model(path, "cpu", "bfloat16", lean=False)
    assert (lean.decoder is not None) == (family in KNOWN)
    assert modules.decoder is None
    prints = {plain_runner(loaded, 512, False).numerics_fingerprint for loaded in (lean, modules)}
    assert len(prints) == (2 if family in KNOWN else 1)
    assert load_model(path, "cpu", "float32").decoder is None


CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in KNOWN),
    ("llama", {"intermediate_size": 100}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden": 48, "attention_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("llama", {"head_dim": 24}),
    ("llama", {"head_dim": 64, "num_attention_heads": 6, "hidden": 96}),
    ("llama", {"head_dim": 32, "num_attention_heads": 16, "num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 96}),
    ("qwen2", {"hidden": 128}),
    ("mistral", {"sliding_window": 24, "head_dim": 128}),
    ("mistral", {"sliding_window": 24}),
    ("phi3", {"sliding_window": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
]


@pytest.mark.parametrize(("family", "config"), CASES)
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_as_near_to_the_truth_as_the_model_itself(
    tmp_path: Path, family: str, config: dict[str, Any], batch_invariant: bool
) -> None:
    """Chunks of any size over two spans' ends: at most 1.25 of the error that transformers' own bfloat16 pass has.

    The truth is the same weights, rounded to bfloat16, computed in float64.
    """
    path = make_tiny_model(tmp_path, family, layers=4, dtype=torch.bfloat16, **config)
    token_ids = random_ids(530)
    truth, theirs = plain_and_half(path, token_ids)
    loaded = load_model(path, dtype="bfloat16")
    assert loaded.decoder is not None
    logits, _ = run_chunks(plain_runner(loaded, 1024, batch_invariant), token_ids, [1, 2, 40, 460, 5, 9])
    assert (logits - truth).norm() < 1.25 * theirs


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
        ("phi3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_what_a_config_changes_is_left_to_the_modules(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """Other activations, rotations that depend on the pass's length and partial rotations are not in the lean pass."""
    assert load_model(make_tiny_model(tmp_path, family, **config), dtype="bfloat16").decoder is None


def test_a_decoder_that_computes_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof at loading compares logits: a difference that no rule foresaw leads back to the model's modules."""
    path = make_tiny_model(tmp_path, hidden_act="gelu")
    monkeypatch.setattr(llama_weights, "_ACTIVATIONS", ("gelu",))
    loaded = load_model(path, dtype="bfloat16")
    assert loaded.decoder is None
    logits, _ = run_chunks(plain_runner(loaded, 512, False), random_ids(30), [])
    assert distance(logits, plain_logits(plain_model(path, "bfloat16"), random_ids(30))) < 0.05


def test_long_contexts_attend_by_one_call(tmp_path: Path) -> None:
    """Over more slots than products were checked for, torch's fused call computes the same attention."""
    runner = plain_runner(load_model(make_tiny_model(tmp_path), dtype="bfloat16"), 4096, True)
    token_ids = random_ids(600)
    by_products, _ = run_chunks(runner, token_ids, [500, 20, 3])
    runner.rules = replace(runner.rules, product_slots=512)
    fused, cache = run_chunks(runner, token_ids, [500, 20, 3])
    assert torch.equal(fused[:512], by_products[:512])
    assert 0 < distance(fused[512:], by_products[512:]) < 0.05
    tree = SequenceInput(cache, [1, 2, 3], [-1, 0, 0], range(3))
    chain = SequenceInput(cache, [1, 3], None, range(2))
    assert torch.equal(runner.forward([tree])[0][2], runner.forward([chain])[0][1])


def test_the_check_finds_row_counts_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed product that sums few rows in another order is seen, and padded around or refused."""
    plain = products._multiply

    def two_kernels(least: int) -> Any:
        def multiply(x: Tensor, packed: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
            whole = plain(x, packed, bias, *rest)
            if x.shape[0] >= least:
                return whole
            half = x.shape[1] // 2
            first, second = x.clone(), x.clone()
            first[:, half:], second[:, :half] = 0, 0
            return plain(first, packed, None, *rest) + plain(second, packed, bias, *rest)

        return multiply

    loaded = load_model(make_tiny_model(tmp_path), dtype="bfloat16")
    monkeypatch.setattr(products, "_multiply", two_kernels(4))
    assert selfcheck.find_rules(loaded).linear.minimum == 4
    monkeypatch.setattr(products, "_multiply", two_kernels(33))
    assert selfcheck.find_rules(loaded).product_tile == 32
    monkeypatch.setattr(products, "_multiply", lambda x, *rest: plain(x, *rest) * (1 + torch.arange(len(x))[:, None]))
    with pytest.raises(ConfigError, match="products depend on the number of rows"):
        plain_runner(loaded, 512, True)


def test_rows_beyond_a_tile_are_cut(tmp_path: Path) -> None:
    """More rows than products take at once, chunked elsewhere: the same bits, with and without wanted logits."""
    runner = plain_runner(load_model(make_tiny_model(tmp_path, intermediate_size=200), dtype="bfloat16"), 4096, True)
    token_ids = random_ids(700)
    whole, _ = run_chunks(runner, token_ids, [])
    parts, _ = run_chunks(runner, token_ids, [290, 1, 330])
    assert torch.equal(whole, parts)
    (last,) = runner.forward([SequenceInput(runner.new_cache(), token_ids, None, [699])])
    assert torch.equal(last[0], whole[699])
