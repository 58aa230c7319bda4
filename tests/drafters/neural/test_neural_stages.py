"""Staged drafting: a cheaper drafter guesses, the draft model goes along or not, and what comes out is its own."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from moot.core.errors import ConfigError
from moot.core.types import SamplingParams
from moot.drafters.interface import Ask, PathAsk
from moot.drafters.lookup.datastore import build
from moot.drafters.neural.neural import NeuralDrafter
from moot.drafters.registry import MODEL_FREE_KINDS, create
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.neural.draft_models import VOCAB, chain_ids, neural

CONTEXT = 160
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=77)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=5)
ALL_PARAMS = {"greedy": GREEDY, "coupled": COUPLED, "penalised": PENALISED}
STAGES = (
    "suffix",
    "prompt_lookup~max_ngram=3",
    "ngram",
    "recycling",
    "prompt_lookup~min_ngram=3+suffix",
    "neural~model={other}",
    "suffix+neural~model={other}",
    "prompt_lookup+suffix+neural~model={other}~stage_tokens=3",
    "suffix~datastore={store}~min_match=2",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`model` drafts; `other` is one of another seed; `store` holds what `model` says after some prompts."""
    base = tmp_path_factory.mktemp("stages")
    folders = {
        name: make_tiny_model(base / name, context=CONTEXT, seed=seed) for seed, name in enumerate(("model", "other"))
    }
    alone = neural(folders["model"])
    prompts = [prompt(seed) for seed in range(4)]
    build([[*one, *chain_ids(alone, alone.open(one, GREEDY), 40)] for one in prompts], base / "store")
    return folders | {"store": base / "store"}


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    part = [rng.randrange(VOCAB) for _ in range(6)]
    return [*part, rng.randrange(VOCAB), *part]


def spelled(stages: str, folders: dict[str, Path]) -> str:
    return stages.format(**folders)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("params", ALL_PARAMS)
def test_proposals_are_those_of_the_draft_model_alone(folders: dict[str, Path], stages: str, params: str) -> None:
    """Whatever is guessed, committed, asked for or asked ahead: the same ids and the same confidence bytes."""
    min_confidence = 0.006 * ((len(stages) + len(params)) % 2)
    limits = {"min_confidence": min_confidence, "min_chain_confidence": 0.1 * (len(stages) % 3)}
    alone = neural(folders["model"], **limits)
    staged = neural(folders["model"], stages=spelled(stages, folders), **limits)
    rng = random.Random(11)
    texts = [prompt(seed) for seed in range(3)]
    sessions = [[drafter.open(text, ALL_PARAMS[params]) for text in texts] for drafter in (alone, staged)]
    for _ in range(10):
        wanted = [rng.randrange(1, 8) for _ in texts]
        # Token by token for some, as the engine asks; at once for others; several sessions in one call.
        for part in (1, 2):
            asks = [
                [Ask(own[index], max(1, wanted[index] * part // 2)) for index in range(len(texts))] for own in sessions
            ]
            expected, found = alone.propose(asks[0]), staged.propose(asks[1])
            assert found == expected
        for index, chains in enumerate(found):
            ids = chains[0].token_ids if chains else ()
            kept = rng.randrange(len(ids) + 1)
            committed = [*ids[:kept], rng.choice([rng.randrange(VOCAB), texts[index][rng.randrange(10)]])]
            if rng.random() < 0.5 and ids:
                committed = list(ids)
            texts[index] += committed
            alone.extend(sessions[0][index], committed)
            staged.extend(sessions[1][index], committed)
    for drafter, own in zip((alone, staged), sessions, strict=True):
        for session in own:
            drafter.close(session)
        assert drafter.kv_used_tokens == 0


def test_branches_are_those_without_stages(folders: dict[str, Path]) -> None:
    """More than one proposal: stages take no part, before or after, and change nothing."""
    alone, staged = neural(folders["model"]), neural(folders["model"], stages="suffix")
    one, other = alone.open(prompt(1), COUPLED), staged.open(prompt(1), COUPLED)
    for width in (1, 3, 1):
        assert staged.propose([Ask(other, 5, width)]) == alone.propose([Ask(one, 5, width)])
        alone.extend(one, [9, 8])
        staged.extend(other, [9, 8])


def test_a_chain_ends_where_it_gets_unlikely_as_a_whole(folders: dict[str, Path]) -> None:
    """The longest head whose confidences multiply to the limit; once its begin is committed, the rest goes on."""
    alone, limited = neural(folders["model"]), neural(folders["model"], min_chain_confidence=0.3)
    text, lengths = prompt(2), []
    for _ in range(6):
        (whole,) = alone.propose([Ask(alone.open(text, GREEDY), 8)])[0]
        session = limited.open(text, GREEDY)
        found = limited.propose([Ask(session, 8)])[0]
        chances = list(itertools.accumulate((byte / 255 for byte in whole.confidences), operator.mul))
        length = sum(chance >= 0.3 for chance in chances)
        lengths.append(length)
        head = [(whole.token_ids[:length], whole.confidences[:length])] if length else []
        assert [(one.token_ids, one.confidences) for one in found] == head
        text += whole.token_ids[:1]
        limited.extend(session, whole.token_ids[:1])
        assert limited.propose([Ask(session, 8)]) == limited.propose([Ask(limited.open(text, GREEDY), 8)])
    assert min(lengths) < 8
    assert max(lengths) > 0


@pytest.mark.parametrize("stages", ["suffix~datastore={store}", "suffix~datastore={store}+neural~model={model}"])
def test_a_guess_that_is_right_saves_forwards(folders: dict[str, Path], stages: str) -> None:
    """A store that holds the draft model's own text: one forward lengthens the path by a whole guess."""
    staged = neural(folders["model"], stages=spelled(stages, folders), stage_tokens=6)
    alone = neural(folders["model"])
    calls, calls_alone = count_forwards(staged), count_forwards(alone)
    session, other = staged.open(prompt(2), GREEDY), alone.open(prompt(2), GREEDY)
    assert chain_ids(staged, session, 30) == chain_ids(alone, other, 30)
    guessed, gone_along = staged.stage_counts
    assert gone_along >= 24
    assert guessed >= gone_along
    assert calls_alone.call_count == 31
    assert calls.call_count <= 8


def count_forwards(drafter: NeuralDrafter) -> Mock:
    counted = Mock(side_effect=drafter._runner.forward)
    drafter._runner.forward = counted  # type: ignore[method-assign]
    return counted


def test_an_end_token_inside_a_guess_ends_the_path(folders: dict[str, Path]) -> None:
    """As without stages: nothing is drafted after what would end the request."""
    alone = neural(folders["model"])
    text = chain_ids(alone, alone.open(prompt(0), GREEDY), 12)
    ending = SamplingParams(temperature=0.0, stop_token_ids=frozenset({text[5]}))
    expected = chain_ids(alone, alone.open(prompt(0), ending), 12)
    assert 0 < len(expected) <= 6
    staged = neural(folders["model"], stages=spelled("suffix~datastore={store}", folders))
    session = staged.open(prompt(0), ending)
    assert chain_ids(staged, session, 12) == expected
    staged.extend(session, [3, 4])
    other = alone.open([*prompt(0), 3, 4], ending)
    assert chain_ids(staged, session, 4) == chain_ids(alone, other, 4)


def test_a_guess_costs_nobody_their_cache(folders: dict[str, Path]) -> None:
    """Where the cache is full, guesses are cut to what a session has room for: proposals stay the same."""
    options = {"kv_capacity_tokens": 1024, "context_limit": 0}
    alone, staged = neural(folders["model"], **options), neural(folders["model"], stages="recycling", **options)
    for drafter in (alone, staged):
        assert drafter._runner.pool.free_tokens == 1024
    texts = [prompt(seed) * 3 for seed in range(2)]
    sessions = [[drafter.open(text, GREEDY) for text in texts] for drafter in (alone, staged)]
    for _ in range(8):
        found = [
            drafter.propose([Ask(s, 6) for s in own]) for drafter, own in zip((alone, staged), sessions, strict=True)
        ]
        assert found[0] == found[1]
        for index in range(2):
            for drafter, own in zip((alone, staged), sessions, strict=True):
                drafter.extend(own[index], found[0][index][0].token_ids[:3])


def test_the_context_limit_holds_with_guesses(folders: dict[str, Path]) -> None:
    """A guess never leads past the draft model's context."""
    alone, staged = neural(folders["model"]), neural(folders["model"], stages="suffix")
    text = (prompt(3) * 20)[: CONTEXT - 5]
    one, other = alone.open(text, GREEDY), staged.open(text, GREEDY)
    for _ in range(6):
        assert staged.propose([Ask(other, 8)]) == alone.propose([Ask(one, 8)])
        alone.extend(one, text[:1])
        staged.extend(other, text[:1])
    assert staged.propose([Ask(other, 8)]) == [[]]


@pytest.mark.parametrize("kind", MODEL_FREE_KINDS)
def test_what_follows_a_path_is_what_follows_it_once_committed(kind: str) -> None:
    """A stage is asked after a path that is not committed: it says what it would say, and forgets the path."""
    stage = create(kind, {"vocab_size": VOCAB})
    period = [4, 9, 2, 7, 5, 1, 8]
    session = stage.open(period * 6, GREEDY)
    before = stage.propose([Ask(session, 6)])
    for length in range(1, 6):
        path = period[:length]
        asks = [PathAsk(session, path, 4), PathAsk(session, [*path, 200], 4), PathAsk(session, [200, *path], 4)]
        along, lost, found_again = stage.after(asks)
        assert along == tuple((period * 2)[length : length + 4])
        assert lost == ()
        assert found_again[:1] in (along[:1], ())
    assert stage.propose([Ask(session, 6)]) == before
    assert stage.after([PathAsk(session, (), 6)]) == [before[0][0].token_ids]


def test_a_neural_stage_keeps_the_path_in_its_cache(folders: dict[str, Path]) -> None:
    """Asked after a path and then told that it was committed, it feeds each of its ids once."""
    stage = neural(folders["other"])
    session = stage.open(prompt(1), PENALISED)
    length = len(prompt(1))
    (ids,) = stage.after([PathAsk(session, (7, 8, 9), 3)])
    assert len(session.tokens) == length
    fresh = stage.open([*prompt(1), 7, 8, 9], PENALISED)
    held: Sequence[int] = [token for token, _ in session.ahead]
    assert held[:3] == [7, 8, 9]
    assert chain_ids(stage, fresh, 3)[0] == ids[0]
    cached = session.cache.length
    stage.extend(session, [7, 8])
    assert session.cache.length == cached
    stage.close(session)
    stage.close(fresh)
    assert stage.kv_used_tokens == 0


@pytest.mark.parametrize(
    ("stages", "word"),
    [
        ("nosuch", "unknown drafter kind nosuch"),
        ("suffix~min_match", "is not kind"),
        ("suffix~often=1", "unknown option of drafter kind suffix: often"),
        ("suffix+", "unknown drafter kind"),
        ("prediction", "cannot be a stage"),
        ("neural~model=/nowhere", "nowhere"),
    ],
)
def test_stages_that_cannot_be_are_named(folders: dict[str, Path], stages: str, word: str) -> None:
    """The error says which stage, and what is wrong with it."""
    with pytest.raises(Exception, match=word) as caught:
        neural(folders["model"], stages=stages)
    assert isinstance(caught.value, ConfigError) or type(caught.value).__name__ == "ModelRefused"
