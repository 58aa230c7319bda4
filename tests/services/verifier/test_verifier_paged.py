"""The accelerator's way through a whole engine, on the CPU: paged KV and all rows drawn at once change no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moot.core.errors import RequestPoisoned
from moot.core.options import make_config
from moot.core.types import Draft, SamplingParams
from moot.model.backend import plain_runner
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.loading.load import LoadedModel
from moot.runtime import faults
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from tests.services.verifier.verifier_driver import Suite, coverage, make_suite, play, run

MAX_K = 8
NUM_CASES = 400


@pytest.fixture
def make_paged(loaded_model: Callable[..., LoadedModel]) -> Iterator[Callable[..., Engine]]:
    """Engines over GpuRunner; at the end each must hold nothing."""
    engines: list[Engine] = []

    def make(pages: int = 64, **options: Any) -> Engine:
        runner = GpuRunner(loaded_model(), pages * 512, False, use_graphs=True)
        engines.append(Engine(runner, make_config(VerifierConfig, model="tiny", **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()
        with torch.inference_mode():
            while engine.step():
                pass
        assert engine.stats.num_sessions == 0
        assert engine.runner.pool.used_tokens == 0


@pytest.fixture(scope="module")
def suite(loaded_model: Callable[..., LoadedModel]) -> Suite:
    """Plain decoding by the CPU's runner and its sampler, row by row."""
    engine = Engine(plain_runner(loaded_model(), 64 * 512, False), make_config(VerifierConfig, model="tiny"))
    return make_suite(engine, range(NUM_CASES))


def test_any_draft_leaves_the_text_unchanged(make_paged: Callable[..., Engine], suite: Suite) -> None:
    """Chains, trees, late and malformed drafts and moves, any parameters, eight at once: the ids of plain decoding, by
    the other runner and the other sampler."""
    engine = make_paged(max_num_seqs=16)
    wrong, results = suite.compare(engine)
    assert wrong == []
    seen = coverage(suite, results)
    wanted = [f"accepted_{number}" for number in range(MAX_K)]
    wanted += ["accepted_later_sibling", "all_accepted", "end_inside", "max_tokens_inside", "greedy", "sampled"]
    assert not [name for name in wanted if not seen[name]], seen


def test_a_full_pool_changes_nothing(make_paged: Callable[..., Engine], suite: Suite) -> None:
    """With two pages for eight requests at once they wait for each other's pages and fill them anew."""
    engine = make_paged(pages=2, max_num_seqs=8)
    assert suite.compare(engine, mischief=False)[0] == []


def test_logprobs_are_those_of_the_other_way(
    make_paged: Callable[..., Engine], loaded_model: Callable[..., LoadedModel]
) -> None:
    """Log-probabilities drawn with all rows at once equal those computed along the walk."""
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, logprobs=3)
    plain = Engine(plain_runner(loaded_model(), 8 * 512, False), make_config(VerifierConfig, model="tiny"))
    (expected,) = run(plain, [play([1, 2, 3], params)])
    text = expected.output_token_ids

    def draft_of(output: tuple[int, ...]) -> Draft:
        return Draft.chain((*text[len(output) : len(output) + 3], 7))

    (found,) = run(make_paged(), [play([1, 2, 3], params, draft_of)])
    assert found.output_token_ids == text
    assert len(found.logprobs) == len(text)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours.rank == theirs.rank
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_poisoned_row_ends_its_own_request(
    make_paged: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are not finite fail the request that has them; others of the batch go on unharmed."""
    params = SamplingParams(temperature=0.0, max_tokens=6)
    expected = [one.output_token_ids for one in run(make_paged(), [play([n], params) for n in range(1, 5)])]
    monkeypatch.setattr(faults, "_active", faults.parse_faults("verifier.logits=nan@bad"))
    plays = [play([n], replace(params), request_id="bad" if n == 2 else "good") for n in range(1, 5)]
    results = run(make_paged(), plays)
    assert results[1].failure is not None
    assert results[1].failure.error is RequestPoisoned
    assert [results[index].output_token_ids for index in (0, 2, 3)] == [expected[index] for index in (0, 2, 3)]
