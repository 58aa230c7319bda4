"""The target drafting for itself with a part of its layers: exact where the others do nothing, harmless everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moot.core.errors import ConfigError
from moot.core.types import SamplingParams
from moot.model.decoder.products import can_pack
from moot.model.loading.load import load_model
from moot.testing.tiny_model import make_tiny_model
from tests.services.verifier.verifier_driver import (
    Case,
    MakeEngine,
    attached_cases,
    drafted_as_plain,
    engine_on,
    wish,
)

packs = can_pack(torch.bfloat16, torch.device("cpu"))


@pytest.fixture(scope="module")
def idle_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which 1 and 2 add nothing."""
    folder = make_tiny_model(tmp_path_factory.mktemp("idle"), layers=4, dtype=torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers[1:3]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind", ["paged", pytest.param("packed", marks=pytest.mark.skipif(not packs, reason="needs bfloat16 products"))]
)
def test_without_idle_layers_it_says_what_the_target_says(idle_layers: Path, kind: str) -> None:
    """Every token of every draft is accepted, several sessions at once, greedy and sampled: it reads the caches, the
    positions and the noise that the target does."""
    sampled = SamplingParams(temperature=0.8, seed=9, max_tokens=17, ignore_eos=True, repetition_penalty=1.3)
    greedy = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    everything = [Case((5, 6, 7 + seed), (greedy, sampled)[seed % 2], seed, 4) for seed in range(6)]
    dtype, paged = ("float32", True) if kind == "paged" else ("bfloat16", False)
    loaded = load_model(idle_layers, "cpu", dtype, lean=not paged)
    plain, engine = (
        engine_on(loaded, pages=16, batch_invariant=not paged, paged=paged, drafters=drafters)
        for drafters in ((), ("self:skip=1+2",))
    )
    results = drafted_as_plain(plain, engine, everything, lambda _: wish("self"))
    for result in results:
        # The opening, then four drafted and one more per round; the last round drafts what may still come.
        assert [one.num_accepted for one in result.verifications] == [0, 4, 4, 4, 0]
    assert engine.runner.pool.used_tokens == 0


@pytest.mark.skipif(not packs, reason="needs bfloat16 products")
@pytest.mark.parametrize("skip", ["1", "0+2", "1+2+3"])
def test_texts_are_plain_ones_whatever_is_left_out(make_engine: MakeEngine, skip: str) -> None:
    """Bit by bit in batch-invariant mode, beside lookahead, whose guesses share the steps: what drafting leaves behind
    in a cache reaches nobody."""
    options: dict[str, Any] = {"batch_invariant": True, "model": {"layers": 4}}
    plain = make_engine("llama", "bfloat16", **options)
    engine = make_engine("llama", "bfloat16", **options, drafters=(f"self:skip={skip}", "lookahead"))
    results = drafted_as_plain(plain, engine, attached_cases(12), lambda _: wish("self", "lookahead", width=2))
    said = {proposal.drafter_id for one in results for answer in one.verifications for proposal in answer.proposals}
    assert "self" in said
    assert len(engine.serving.attached.drafters) == 2


def test_what_cannot_be_is_refused_at_the_start(make_engine: MakeEngine) -> None:
    """Layers that are not there, all of them, no numbers, and a target whose own modules compute."""
    with pytest.raises(ConfigError, match="driven by its own modules"):
        make_engine("llama", "float64", drafters=("self:skip=1",))
    with pytest.raises(ConfigError, match="layers joined by"):
        make_engine("llama", "float64", drafters=("self:skip=1-2",))
    if packs:
        for skip in ("0+1", "2"):
            with pytest.raises(ConfigError, match="some of the layers 0 to 1"):
                make_engine("llama", "bfloat16", drafters=(f"self:skip={skip}",))
