"""Poison: numbers that are not finite end the request whose text they are in, and never one that only drafted them, nor
its batch-mates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moot.core.errors import MootError, PeerError, RequestPoisoned
from moot.core.types import ROOT, Draft, SamplingParams
from tests.services.verifier.verifier_driver import MakeEngine, play, run, texts

POISON = 7
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={POISON: -100.0})


@pytest.fixture
def make_poisoned(make_engine: MakeEngine) -> MakeEngine:
    """Engines whose model has an embedding that is not finite."""

    def make(**options: object):  # type: ignore[no-untyped-def]  # as make_engine
        engine = make_engine(**options)
        runner = engine.runner
        runner.loaded = replace(runner.loaded, model=copy.deepcopy(runner.loaded.model))
        with torch.no_grad():
            runner.loaded.model.get_input_embeddings().weight[POISON] = torch.nan
        return engine

    return make


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "draft",
    [
        Draft.chain((POISON, 8)),
        Draft.chain((8, 9, POISON)),
        Draft((POISON, 8), (ROOT, ROOT)),
        Draft((8, POISON), (-1, 0)),
    ],
    ids=["chain", "end of a chain", "sibling", "child"],
)
def test_a_poisonous_draft_token_changes_no_text(
    make_poisoned: MakeEngine, batch_invariant: bool, draft: Draft
) -> None:
    """Masked slots that are not finite make every row of their request NaN: the round is decided without a draft."""
    engine = make_poisoned(batch_invariant=batch_invariant)
    plain, drafted = texts(run(engine, [play((1, 2, 3), GREEDY), play((1, 2, 3), GREEDY, lambda _: draft)]))
    assert drafted == plain


def test_what_a_poisonous_draft_left_behind_a_page_border_changes_no_text(make_poisoned: MakeEngine) -> None:
    """A slot of the next page is not attended to at once; when the text gets there it must not have been kept."""
    engine = make_poisoned(batch_invariant=True)
    prompt = tuple(index % 250 + 8 for index in range(470))
    drafts = {1: Draft.chain((*(8,) * 50, POISON))}
    params = replace(GREEDY, max_tokens=60)
    plays = [play(prompt, params), play(prompt, params, lambda output: drafts.get(len(output), Draft()))]
    plain, drafted = texts(run(engine, plays))
    assert drafted == plain


def test_a_text_that_is_poisoned_ends_with_and_without_drafts(make_poisoned: MakeEngine) -> None:
    """Where plain decoding fails, a round with a draft fails too: nothing is written past the poison."""
    engine = make_poisoned()
    certain = replace(GREEDY, logit_bias={POISON: 1000.0})
    plain, drafted = run(engine, [play((1, 2, 3), certain), play((1, 2, 3), certain, lambda _: Draft.chain((8, 9)))])
    for result in (plain, drafted):
        assert result.output_token_ids == (POISON,)
        assert result.failure is not None
        assert result.failure.error is RequestPoisoned


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("verifier.logits=nan@bad", RequestPoisoned, "the model's logits are not finite"),
        ("verifier.forward=raise@bad", PeerError, "internal error (RuntimeError)"),
    ],
)
def test_a_request_that_breaks_a_step_fails_alone(
    make_engine: MakeEngine,
    set_faults: Callable[[str], None],
    paged: bool,
    fault: str,
    error: type[MootError],
    message: str,
) -> None:
    """A row of NaN ends its own session; a forward pass that raises is repeated in halves until the guilty request is
    alone, and the answer names no content. The text of batch-mates is untouched."""
    engine, params = make_engine(paged=paged), replace(GREEDY, logit_bias={})
    expected = [texts(run(engine, [play([number], params)]))[0] for number in range(1, 7)]
    set_faults(fault)
    plays = [play([number], params, request_id="bad" if number == 4 else "good") for number in range(1, 7)]
    results = run(engine, plays)
    failure = results.pop(3).failure
    assert failure is not None
    assert (failure.error, failure.message) == (error, message)
    assert texts(results) == expected[:3] + expected[4:]
