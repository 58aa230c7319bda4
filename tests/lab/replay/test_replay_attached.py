"""Recording drafters that are attached to the verifier: what they are shown is what a verifier shows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from lab.replay.evaluate import Policies, Replay, outcome_of
from lab.replay.folder import open_recording
from lab.replay.making import Machine, TextPlan, make_texts, target_runner
from lab.replay.recorder import Asking, record_drafter
from lab.replay.replay_prompts import Prompt
from moot.core.errors import ConfigError
from moot.core.options import make_config
from moot.core.types import Proposal
from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape
from moot.drafters.interface import parse_entries
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import make_tiny_model
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from tests.lab.replay.recordings import quiet
from tests.services.verifier.local_sessions import LocalSession

PROMPTS = [Prompt(f"{number}7", "qa", text) for number, text in enumerate(("abc", "x = x + 1; " * 30, "??"))]
QUIET = Machine(device="cpu", num_threads=1, num_rows=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    made = RecurrentHead(RecurrentHeadShape(64, 16, 259, 2), torch.arange(259))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    made.save(folder, {})
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_proposals_are_the_verifiers_own(tmp_path: Path, model: Path, head: Path, temperature: float) -> None:
    """At every place of every text, greedy and sampled, chain for chain and byte for byte, prompts of several chunks
    included: the recorder asks with the states that a verifier has."""
    plan = TextPlan(model=str(model), max_tokens=12, temperature=temperature, seed=3, dtype="float32")
    meta, texts = make_texts(tmp_path, plan, QUIET, PROMPTS, quiet)
    flag = f"heads:path={head}:max_tokens=3"
    (entry,) = parse_entries([flag], "--drafters")
    target: Callable[[], ModelRunner] = cache(lambda: target_runner(plan, QUIET))
    record = record_drafter(tmp_path, entry, texts, meta.vocab_size, Asking(3, 2), quiet, target)
    assert record.facts.num_bytes == sum(file.stat().st_size for file in head.iterdir())
    assert record.facts.family == "heads"
    config = make_config(VerifierConfig, model="tiny", drafters=(flag,), kv_capacity_tokens=8192)
    engine = Engine(target_runner(plan, QUIET), config)
    engine.start()
    try:
        for index, text in enumerate(texts):
            said: list[tuple[Proposal, ...]] = []
            wish = {"inside_drafter_ids": ("heads",), "inside_width": 2, "num_inside_tokens": 3}
            with LocalSession(engine, text.prompt_token_ids, text.params, **wish) as session:  # type: ignore[arg-type]
                answer = session.open()
                while answer.finish_reason is None:
                    said.append(answer.proposals)
                    answer = session.verify()
            places = record.of_text(index)
            # A verifier makes none that could not be accepted: at the end it is asked for less.
            for live, recorded in zip(said[:-3], places, strict=False):
                assert live == recorded
            assert len(said) > 5
    finally:
        engine.stop()
    outcome = outcome_of(Replay(open_recording(tmp_path)).run(Policies(num_speculative_tokens=3)))
    assert outcome.num_rounds > 0
    assert record_drafter(tmp_path, entry, texts, meta.vocab_size, Asking(3, 2), quiet, target).num_texts == len(texts)


def test_without_its_target_such_a_drafter_cannot_be_recorded(tmp_path: Path, head: Path) -> None:
    """It says so in one sentence."""
    (entry,) = parse_entries([f"heads:path={head}"], "--drafters")
    with pytest.raises(ConfigError, match="is attached to the verifier"):
        record_drafter(tmp_path, entry, [], 259, Asking(3, 2), quiet)
