"""Coupled, independent and greedy drafts: each is what it is called, whoever draws."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moot.core.errors import ConfigError
from moot.core.history import History
from moot.core.sampling import sample_token
from moot.core.types import SamplingParams
from moot.drafters.attached.attached_interface import AttachedAsk
from moot.drafters.attached.kinds import create_attached
from moot.drafters.interface import Ask, parse_entries
from moot.drafters.neural.draft_model import COUPLED, DRAWS, GREEDY, INDEPENDENT, drafting_params
from moot.drafters.registry import create
from moot.model.backend import plain_runner
from moot.model.loading.load import load_model
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.attached.heads_made import make_head

HOT = SamplingParams(temperature=300.0, top_k=30, seed=11, ignore_eos=True)
LOGITS = [1.0, 0.5, 0.0, -0.5, 0.9]
PLACES = 4000


def test_only_coupled_drafts_draw_with_the_targets_noise() -> None:
    """A drafter with the target's own distribution is right always when coupled, with probability sum p^2 when
    independent, and with max p when greedy."""
    probs = torch.tensor(LOGITS).softmax(0)
    expected = {COUPLED: 1.0, INDEPENDENT: float((probs**2).sum()), GREEDY: float(probs.max())}
    params = SamplingParams(temperature=1.0, seed=5)
    said = [sample_token(LOGITS, params, place, [], ()) for place in range(PLACES)]
    for draws in DRAWS:
        own = drafting_params(params, draws)
        right = sum(sample_token(LOGITS, own, place, [], ()) == said[place] for place in range(PLACES))
        # Four standard deviations of a share of 4000 are less than 0.032.
        assert right / PLACES == pytest.approx(expected[draws], abs=0.032)


def test_independent_noise_follows_the_requests_seed() -> None:
    """Two requests with other seeds are drafted with other noise, the same one always with the same; nothing but the
    noise changes, and a greedy request has none."""
    seeds = {drafting_params(replace(HOT, seed=seed), INDEPENDENT).seed for seed in range(50)}
    assert len(seeds | set(range(50))) == 100
    assert replace(drafting_params(HOT, INDEPENDENT), seed=HOT.seed) == HOT
    assert replace(drafting_params(HOT, GREEDY), temperature=HOT.temperature) == HOT
    cold = replace(HOT, temperature=0.0)
    assert all(drafting_params(cold, draws) == cold for draws in DRAWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draws") / "model", context=64)


def test_a_draft_model_and_a_head_draw_as_they_are_told(folder: Path, tmp_path: Path) -> None:
    """With either option a drafter proposes for a hot request what the default proposes for one that is greedy, or
    that has the other noise; and that is something else."""
    runner = plain_runner(load_model(folder, "cpu", "float32"), 2048, False)
    head = make_head(tmp_path, runner.loaded)
    ids = random.Random(1).choices(range(256), k=9)
    state = torch.randn(64, generator=torch.Generator().manual_seed(2))

    def by_head(params: SamplingParams, draws: str) -> tuple[int, ...]:
        (entry,) = parse_entries([f"h=heads:path={head}:draws={draws}"], "--drafters")
        ask = AttachedAsk(ids, params, History(ids[:3], ids[3:]), state, 4)
        return create_attached(entry, runner).propose([ask])[0][0].token_ids

    def by_model(params: SamplingParams, draws: str) -> tuple[int, ...]:
        options = {"model": folder, "dtype": "float32", "device": "cpu", "num_threads": 1, "draws": draws}
        drafter = create("neural", options)
        session = drafter.open(ids, params)
        return drafter.propose([Ask(session, 4)])[0][0].token_ids

    for propose in (by_head, by_model):
        said = {draws: propose(HOT, draws) for draws in DRAWS}
        assert len(set(said.values())) == len(DRAWS)
        for draws in DRAWS:
            assert said[draws] == propose(drafting_params(HOT, draws), COUPLED)
        assert propose(replace(HOT, temperature=0.0), INDEPENDENT) == said[GREEDY]
        with pytest.raises(ConfigError, match="draws"):
            propose(HOT, "somehow")
