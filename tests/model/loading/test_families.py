"""Families with something of their own: windows in some layers, projections around the layers, partial rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.modules.attention import softcapped_attention
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import assert_is_the_plain_pass, random_ids

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    ("gemma3_text", {"layers": 4, "num_key_value_heads": 1, "sliding_window": 8, "layer_types": WINDOWS}),
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("phi3", {"sliding_window": 24}),
    ("phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "config"), CASES)
def test_what_a_family_has_of_its_own_is_computed(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """Logits are those of transformers' own pass, and the same bits whatever the chunks."""
    assert_is_the_plain_pass(make_tiny_model(tmp_path, family, **config))


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_tree_over_a_window_s_edge_gives_its_chains_numbers(tmp_path: Path, family: str) -> None:
    """A draft token sees as many of the last tokens as in plain decoding, the draft tokens before it counted."""
    path = make_tiny_model(tmp_path, family, sliding_window=8)
    prefix, first, second = random_ids(21), random_ids(6, seed=1), random_ids(6, seed=2)
    runner = plain_runner(load_model(path, dtype="float64"), 4096, True)

    def after_prefix(token_ids: list[int], parents: list[int] | None) -> torch.Tensor:
        cache = runner.new_cache()
        runner.forward([SequenceInput(cache, prefix)])
        cache.commit(range(len(prefix)))
        return runner.forward([SequenceInput(cache, token_ids, parents, range(len(token_ids)))])[0]

    tree = after_prefix(first + second, [-1, 0, 1, 2, 3, 4, -1, 6, 7, 8, 9, 10])
    assert torch.equal(tree[:6], after_prefix(first, None))
    assert torch.equal(tree[6:], after_prefix(second, None))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_capped_scores_follow_their_formula(kv_heads: int) -> None:
    """cap * tanh(q k / cap) before mask and softmax, query heads sharing the keys of their group."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64) * 5
    key, value = (torch.randn(kv_heads, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(3, 6, dtype=torch.float64).masked_fill_(torch.ones(3, 6).triu(4).bool(), float("-inf"))
    found = softcapped_attention(query, key, value, mask, 0.3, 2.0)
    for head in range(4):
        group = head // (4 // kv_heads)
        for row in range(3):
            scores = [
                2.0 * torch.tanh(query[head, row] @ key[group, slot] * 0.3 / 2.0) + mask[row, slot] for slot in range(6)
            ]
            weights = torch.stack(scores).softmax(0)
            torch.testing.assert_close(found[head, row], weights @ value[group])
