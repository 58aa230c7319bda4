"""A draft model over the paged runner, which drives it on a GPU; here the same runner on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

from moot.drafters.neural.neural_sessions import Drafted, NeuralSession, SessionFeed
from moot.drafters.neural.stepwise import NeuralDrafting
from moot.model.backend import plain_runner
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner
from moot.model.sampling.sampler import Sampler
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.neural.draft_models import COUPLED, GREEDY, VOCAB


def drafted_texts(runner: ModelRunner) -> list[list[list[Drafted]]]:
    """What three sessions draft, as chains and as branches, while their prefixes move on; two have room at a time."""
    feed = SessionFeed(runner, 7)
    drafting = NeuralDrafting(feed, Sampler(VOCAB, frozenset()), 0.0, 1.0)
    sessions = [NeuralSession(params, runner.new_cache()) for params in (GREEDY, COUPLED, GREEDY)]
    rng = random.Random(3)
    for session in sessions:
        feed.add(session)
        session.commit([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))])
    seen = []
    for turn in range(6):
        drafting.chains([(session, 4) for session in sessions[:2]], set())
        seen.append([list(session.ahead) for session in sessions[:2]])
        branches = drafting.branches([(sessions[2], 3, 2)])[id(sessions[2])]
        seen.append([list(path) for path in branches])
        for session in sessions:
            kept = [token for token, _ in session.ahead[: turn % 4]]
            session.commit([*kept, rng.randrange(VOCAB)])
    assert 0 < runner.pool.used_tokens <= 1024
    for session in sessions:
        feed.remove(session)
    assert runner.pool.used_tokens == 0
    return seen


def test_a_draft_model_drafts_the_same_over_pages(tmp_path: Path) -> None:
    """Which runner drives a draft model shows in no proposal, also where caches go to make room and trees are fed."""
    loaded = load_model(make_tiny_model(tmp_path / "model", context=1024), "cpu", "float64", num_threads=1)
    paged = drafted_texts(GpuRunner(loaded, 1024, False))
    assert paged == drafted_texts(plain_runner(loaded, 1024, False))
    assert all(len(path) == 4 for path in paged[0])
    assert len(paged[1]) == 2
