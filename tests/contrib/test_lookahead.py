"""Lookahead: which rows it asks for, what it makes of their answers, and that it keeps nothing for ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contrib.lookahead import LookaheadDrafter, LookaheadOptions
from moot.core.errors import ConfigError
from moot.core.history import History
from moot.core.types import ROOT, SamplingParams
from moot.drafters.attached.attached_interface import AttachedAsk, Guesses
from moot.drafters.interface import parse_options
from moot.model.cache.kv_cache import depths_of

FREE = SamplingParams(temperature=0.0, max_tokens=1000)
NO_STATE = torch.empty(0)


def made(**options: Any) -> LookaheadDrafter:
    runner: Any = SimpleNamespace(info=SimpleNamespace(end_token_ids=frozenset({99})))
    return LookaheadDrafter("l", parse_options(LookaheadOptions, "lookahead", {"vocab_size": 100, **options}), runner)


def ask(ids: Sequence[int], answers: Sequence[int | None] = (), num_tokens: int = 6, width: int = 1) -> AttachedAsk:
    return AttachedAsk(ids, FREE, History(ids), NO_STATE, num_tokens, width, 1, tuple(answers))


def paths(guesses: Guesses) -> list[list[int]]:
    """Of every guess the ids from the prefix to it."""
    found: list[list[int]] = []
    for token_id, parent in zip(guesses.token_ids, guesses.parents, strict=True):
        found.append([*(found[parent] if parent != ROOT else []), token_id])
    return found


def play(drafter: LookaheadDrafter, target: Callable[[list[int]], int], ids: list[int], steps: int) -> int:
    """Rounds as a verifier drives them: draft, guesses, answers. Returns how many proposed ids were accepted."""
    accepted = 0
    ((*chains,),) = drafter.propose([ask(ids)])
    for _ in range(steps):
        guesses = drafter.guess(1, ids, 64, 100)
        answers = [target([*ids, *path]) for path in paths(guesses)]
        draft = chains[0].token_ids if chains else ()
        for token in draft:
            if target(ids) != token:
                break
            ids.append(token)
            accepted += 1
        ids.append(target(ids))
        ((*chains,),) = drafter.propose([ask(ids, answers)])
    return accepted


def test_it_finds_what_the_target_will_say() -> None:
    """A target that turns in a long circle. The prompt shows a few tokens further on; what follows those is found by
    guessing from them, and is there when the text arrives."""
    circle = random.Random(1).sample(range(90), 90)
    after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    ids = [*circle[10:16], circle[0]]
    assert play(made(), lambda text: after[text[-1]], ids, 40) > 10
    assert ids[6:] == (circle * 9)[: len(ids) - 6]


def test_guesses_are_a_chain_with_a_branch_at_each_place() -> None:
    """Level after level: the first one a chain after the prefix, each later token under the one of the level before;
    with less room there are fewer columns, and none where not even one fits."""
    drafter = made(window=4, ngram=4)
    ids = list(range(20))
    drafter.propose([ask(ids)])
    guesses = drafter.guess(1, ids, 64, 100)
    assert guesses.parents == (ROOT, 0, 1, 2, *range(8))
    assert depths_of(guesses.parents) == [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]
    assert len(drafter.guess(1, ids, 11, 100).token_ids) == 9
    assert len(drafter.guess(1, ids, 64, 4).token_ids) == 6
    assert max(depths_of(drafter.guess(1, ids, 64, 4).parents)) == 3
    assert drafter.guess(1, ids, 2, 100) == drafter.guess(1, ids, 64, 2) == Guesses()


def test_answers_complete_n_grams_and_become_the_last_level() -> None:
    """Each column's ids and the answer at its end; the next guesses are one place further on, and further still by
    what was accepted. A row without an answer adds nothing."""
    drafter = made(window=3, ngram=3)
    ids = [10, 11, 12, 13, 14]
    drafter.propose([ask(ids)])
    first = drafter.guess(1, ids, 64, 100).token_ids
    level0, level1 = first[:3], first[3:]
    ids.append(20)
    drafter.propose([ask(ids, [0, 0, 0, 50, None, 52])])
    second = drafter.guess(1, ids, 64, 100).token_ids
    assert second[:3] == (level1[0], level0[1], level1[2])
    assert second[3:] == (50, level1[1], 52)
    ids += [21, level0[0]]
    (chains,) = drafter.propose([ask(ids, (), 2)])
    assert [chain.token_ids for chain in chains] == [(level1[0], 50)]
    assert drafter.guess(1, ids, 64, 100).token_ids[:3] == (second[2], second[0], second[1])


def test_proposals_are_bounded_by_k_width_and_ends() -> None:
    """N-grams follow one another up to K; a wide ask gets other first tokens; nothing follows an end."""
    drafter = made(window=1, ngram=3)
    ids = [1, 2, 3]
    drafter.propose([ask(ids)])
    for gram in ((3, 4, 5), (5, 6, 7), (7, 99, 8), (3, 40, 41), (3, 40, 41)):
        drafter._keep(drafter._sessions[1].pool, gram)
    for number, expected in ((1, (40,)), (9, (40, 41))):
        assert [chain.token_ids for chain in drafter.propose([ask(ids, (), number)])[0]] == [expected]
    chains = drafter.propose([ask(ids, (), 9, 3)])[0]
    assert [chain.token_ids for chain in chains] == [(40, 41), (4, 5, 6, 7, 99)]
    assert [chain.confidences[0] for chain in chains] == [64, 32]
    assert [len(chain.token_ids) for chain in drafter.propose([ask(ids, (), 3, 3)])[0]] == [2, 3]


def test_what_it_keeps_is_bounded_and_ends_with_the_session() -> None:
    """N-grams per first token, first tokens per session, sessions until they end."""
    drafter = made(window=1, ngram=2, pool=3)
    drafter.propose([ask([1])])
    pool = drafter._sessions[1].pool
    for key in range(5000):
        for value in range(5):
            drafter._keep(pool, (key, value))
    assert len(pool) == 4096
    assert {len(known) for known in pool.values()} == {3}
    assert drafter.num_sessions == 1
    drafter.end(1)
    drafter.end(1)
    assert drafter.num_sessions == 0


@pytest.mark.parametrize("options", [{"window": 0}, {"ngram": 1}, {"ngram": 9}, {"pool": 0}])
def test_bad_options_are_named(options: dict[str, int]) -> None:
    """Bounds hold, or steps would grow without any."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        made(**options)
