"""Hidden states that a pass leaves for drafters: those of the wanted rows, whatever computes, and no logit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moot.model.backend import plain_runner
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model

IDS = [7, 3, 250, 3, 9, 11]
OTHER = [5, 5, 6]
TREE = [-1, 0, 0, 2]


@pytest.fixture(scope="module", params=("llama float32", "llama bfloat16", "opt float32", "paged float32"))
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Twice the same: modules, our decoder (bfloat16 where the CPU has it), a model with biases, and paged."""
    family, dtype = request.param.split()
    folder = make_tiny_model(tmp_path_factory.mktemp("states"), "llama" if family == "paged" else family)
    loaded = load_model(folder, "cpu", dtype, lean=family != "paged")
    make = (lambda: GpuRunner(loaded, 2048, False)) if family == "paged" else lambda: plain_runner(loaded, 2048, True)
    return [make(), make()]


def passes(runner: Any, keeps: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A pass of two requests, one of them a tree, then one more row; logits and states of all."""
    if keeps:
        runner.keep_states()
    first, second = runner.new_cache(), runner.new_cache()
    inputs = [SequenceInput(first, IDS[:4], TREE, (1, 3)), SequenceInput(second, OTHER, None, (2,))]
    logits = list(runner.forward(inputs))
    states = runner.states() if keeps else []
    first.commit([0, 2, 3])
    second.commit(range(3))
    logits += runner.forward([SequenceInput(first, IDS[4:5], None, (0,)), SequenceInput(second, [4], None, ())])
    if keeps:
        states += runner.states()
    first.free()
    second.free()
    return logits, states


def test_states_are_what_the_output_layer_turns_into_the_logits(runners: list[Any]) -> None:
    """Row for row, also of trees and of inputs that want no logits; and bit by bit the logits of a runner that keeps
    nothing."""
    plain, _ = passes(runners[0], keeps=False)
    logits, states = passes(runners[1], keeps=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, logits, strict=True))
    assert [len(one) for one in states] == [2, 1, 1, 0]
    loaded: LoadedModel = runners[1].loaded
    for one, rows in zip(logits, states, strict=True):
        if len(rows):
            again = output_layer(loaded, rows)
            assert torch.allclose(again.float(), one, atol=0.05 if rows.dtype is torch.bfloat16 else 1e-4)


def output_layer(loaded: LoadedModel, rows: torch.Tensor) -> torch.Tensor:
    if loaded.decoder is not None:
        return loaded.decoder.head(rows)
    model: Any = loaded.model
    with torch.inference_mode():
        return model.get_output_embeddings()(rows)


def test_states_must_be_asked_for_before_the_pass(tmp_path: Path) -> None:
    """A drafter that was wired up wrongly is told so, and never given the states of another pass."""
    runner = plain_runner(load_model(make_tiny_model(tmp_path), "cpu", "float32"), 2048, False)
    cache = runner.new_cache()
    runner.forward([SequenceInput(cache, IDS, None, (0,))])
    with pytest.raises(RuntimeError, match="no hidden states"):
        runner.states()
    runner.keep_states()
    with pytest.raises(RuntimeError, match="no hidden states"):
        runner.states()
    cache.free()
