"""The draft model against a plain full forward without cache and the sampler in plain Python."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moot.core.errors import ConfigError
from moot.core.sampling import sample_token
from moot.core.types import SamplingParams
from moot.drafters.interface import Ask
from moot.drafters.neural.neural import NeuralDrafter
from moot.drafters.neural.neural_sessions import NeuralSession
from moot.drafters.registry import create
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.neural.draft_models import (
    CONTEXT,
    COUPLED,
    GREEDY,
    PENALISED,
    VOCAB,
    chain_ids,
    neural,
    poisoned,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft") / "model", vocab_size=300, context=CONTEXT)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def drafter(folder: Path) -> NeuralDrafter:
    return neural(folder, prefill_chunk=7)


@torch.inference_mode()
def next_row(oracle: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] after `tokens`, from a full forward of all of them."""
    return oracle(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1, :VOCAB]  # type: ignore[no-any-return]


def close(drafter: NeuralDrafter, *sessions: NeuralSession) -> None:
    """Of the last sessions: nothing is left of them."""
    for session in sessions:
        drafter.close(session)
    assert drafter.kv_used_tokens == 0


def continuation(
    oracle: Any, prefix: Sequence[int], num_tokens: int, params: SamplingParams, first: int | None = None
) -> tuple[int, ...]:
    """Token by token from a full forward of everything before; `first` forces the first one."""
    tokens = [*prefix] if first is None else [*prefix, first]
    while len(tokens) < len(prefix) + num_tokens:
        tokens.append(sample_token(next_row(oracle, tokens).tolist(), params, len(tokens), tokens, ()))
    return tuple(tokens[len(prefix) :])


@pytest.mark.parametrize("params", [GREEDY, COUPLED, PENALISED], ids=["greedy", "coupled", "penalised"])
def test_proposal_is_the_models_own_text_after_any_resync(
    drafter: NeuralDrafter, oracle: Any, params: SamplingParams
) -> None:
    """Whatever was committed (none, some or all of the draft, then anything), the next proposal is the model's text."""
    rng = random.Random(3)
    prefix = [rng.randrange(VOCAB) for _ in range(12)]
    session = drafter.open(prefix, params)
    followed = left = 0
    for _ in range(10):
        asked = rng.randrange(1, 6)
        drafted = chain_ids(drafter, session, asked)
        assert drafted == continuation(oracle, prefix, asked, params)
        kept = rng.randrange(asked + 1)
        committed = [*drafted[:kept], rng.randrange(VOCAB)]
        if rng.random() < 0.4:
            # The target agreed throughout and its next token is what would have been drafted next.
            committed = list(continuation(oracle, prefix, asked + 1, params))
            followed += 1
        else:
            left += 1
        drafter.extend(session, committed)
        prefix += committed
        if len(prefix) > 70:
            break
    assert followed
    assert left
    close(drafter, session)


def test_asking_for_more_goes_on_where_the_last_ended(drafter: NeuralDrafter, oracle: Any) -> None:
    """Draft-ahead: the same prefix with a larger K computes only the tokens that are new."""
    prefix = [5, 6, 7, 8]
    session = drafter.open(prefix, COUPLED)
    first = chain_ids(drafter, session, 2)
    cached = session.cache.length
    longer = chain_ids(drafter, session, 6)
    assert longer[:2] == first
    assert longer == continuation(oracle, prefix, 6, COUPLED)
    assert session.cache.length == cached + 4
    assert chain_ids(drafter, session, 3) == longer[:3]
    drafter.extend(session, longer[:4])
    length = session.cache.length
    assert chain_ids(drafter, session, 2) == longer[4:]
    assert session.cache.length == length
    drafter.close(session)


def test_batched_equals_alone(drafter: NeuralDrafter) -> None:
    """Rows of one ragged forward never mix: prefixes, K and parameters differ per ask (C04)."""
    rng = random.Random(9)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(9)]
    opened = [(prefix, rng.choice([GREEDY, COUPLED])) for prefix in prefixes]
    lengths = [rng.randrange(1, 7) for _ in prefixes]
    alone, sessions = ([drafter.open(prefix, params) for prefix, params in opened] for _ in range(2))
    batched = drafter.propose([Ask(*each) for each in zip(sessions, lengths, strict=True)])
    assert batched == [drafter.propose([Ask(*each)])[0] for each in zip(alone, lengths, strict=True)]
    close(drafter, *alone, *sessions)


def test_branches_part_at_the_first_token(drafter: NeuralDrafter, oracle: Any) -> None:
    """width > 1: the first chain is the plain one; each other starts with a next best token and goes on from it."""
    prefix = [1, 2, 3, 4, 5]
    for params in (GREEDY, COUPLED):
        session = drafter.open(prefix, params)
        chains = drafter.propose([Ask(session, 4, 3)])[0]
        assert len({chain.token_ids[0] for chain in chains}) == 3
        assert chains[0].token_ids == continuation(oracle, prefix, 4, params)
        for chain in chains[1:]:
            assert chain.token_ids == continuation(oracle, prefix, 4, params, chain.token_ids[0])
        drafter.extend(session, chains[0].token_ids[:2])
        assert chain_ids(drafter, session, 4) == continuation(oracle, [*prefix, *chains[0].token_ids[:2]], 4, params)
        drafter.close(session)


def test_second_branch_is_the_second_best(drafter: NeuralDrafter, oracle: Any) -> None:
    """Greedy: the first tokens of the branches are the likeliest ids in order."""
    prefix = [40, 41, 42]
    session = drafter.open(prefix, GREEDY)
    chains = drafter.propose([Ask(session, 1, 4)])[0]
    assert [chain.token_ids[0] for chain in chains] == next_row(oracle, prefix).argsort(descending=True)[:4].tolist()
    assert [chain.confidences for chain in chains] == sorted((c.confidences for c in chains), reverse=True)
    drafter.close(session)


def test_stops_before_an_unlikely_token(folder: Path, oracle: Any) -> None:
    """A chain ends where the model's own probability falls below the limit; an unlikely first token abstains."""
    prefix = [9, 8, 7]
    tokens = continuation(oracle, prefix, 6, GREEDY)
    rows = [next_row(oracle, [*prefix, *tokens[:index]]) for index in range(len(tokens))]
    shares = [float(row.softmax(-1)[token]) for row, token in zip(rows, tokens, strict=True)]
    limit = sorted(shares)[2] + 1e-9
    expected = next(index for index, share in enumerate(shares) if share < limit)
    sure = neural(folder, min_confidence=limit)
    assert chain_ids(sure, sure.open(prefix, GREEDY), 6) == tokens[:expected]
    free = neural(folder)
    (chain,) = free.propose([Ask(free.open(prefix, GREEDY), 6)])[0]
    assert chain.confidences == tuple(round(255 * share) for share in shares)
    never = neural(folder, min_confidence=1.0)
    session = never.open(prefix, GREEDY)
    assert never.propose([Ask(session, 6)]) == [[]]
    assert never.propose([Ask(session, 6, 3)]) == [[]]


def test_nothing_is_drafted_after_an_end_token(drafter: NeuralDrafter) -> None:
    """What comes after the end is never used; with ignore_eos drafting goes on."""
    prefix = [3, 1, 4, 1, 5]
    session = drafter.open(prefix, GREEDY)
    tokens = chain_ids(drafter, session, 5)
    drafter.close(session)
    stopping = dataclasses.replace(GREEDY, stop_token_ids=frozenset({tokens[2]}))
    session = drafter.open(prefix, stopping)
    assert chain_ids(drafter, session, 5) == tokens[: tokens.index(tokens[2]) + 1]
    drafter.close(session)


def test_context_limit_is_respected(drafter: NeuralDrafter) -> None:
    """C21: up to its own limit it drafts what fits; past it it abstains, and others in the batch are served."""
    near = drafter.open([1] * (CONTEXT - 3), GREEDY)
    past = drafter.open([1] * (CONTEXT + 50), GREEDY)
    fine = drafter.open([1, 2, 3], GREEDY)
    answers = drafter.propose([Ask(near, 8), Ask(past, 8), Ask(fine, 8)])
    assert [len(chains[0].token_ids) if chains else 0 for chains in answers] == [3, 0, 8]
    drafter.extend(near, [1, 1, 1, 1])
    assert drafter.propose([Ask(near, 8)]) == [[]]
    drafter.warm(past)
    close(drafter, near, past, fine)


def test_ids_in_the_padding_are_never_emitted_nor_fed(drafter: NeuralDrafter) -> None:
    """C07: rows from the tokenizer's size on cannot win; a prefix with an id past the embeddings abstains."""
    session = drafter.open([280, 299, 270], SamplingParams(temperature=5.0, seed=1, ignore_eos=True))
    foreign = drafter.open([1, 2, 300], GREEDY)
    answers = drafter.propose([Ask(session, 30), Ask(foreign, 4)])
    assert len(answers[0][0].token_ids) == 30
    assert all(token < VOCAB for token in answers[0][0].token_ids)
    assert answers[1] == []
    close(drafter, session, foreign)


def test_rows_that_are_not_finite_abstain_alone(folder: Path, tmp_path: Path) -> None:
    """C20: a NaN row drops that proposal only; the same batch serves the others."""
    drafter = neural(poisoned(folder, tmp_path / "model", 200), batch_invariant=False)
    sick, fine = drafter.open([1, 200, 3], GREEDY), drafter.open([1, 2, 3], GREEDY)
    answers = drafter.propose([Ask(sick, 4), Ask(fine, 4)])
    assert answers[0] == []
    assert len(answers[1][0].token_ids) == 4
    assert drafter.propose([Ask(sick, 4, 2)]) == [[]]
    drafter.extend(sick, [4, 5])
    assert drafter.propose([Ask(sick, 4)]) == [[]]


def test_without_room_idle_caches_go_first(folder: Path, oracle: Any) -> None:
    """KV memory is bounded: the least recently used session's cache is rebuilt later, proposals stay the same."""
    small, prefixes, sessions = crowded(folder, 4)
    for _ in range(2):
        for session, prefix in zip(sessions, prefixes, strict=True):
            assert chain_ids(small, session, 3) == continuation(oracle, prefix, 3, GREEDY)
            assert small.kv_used_tokens <= 1024
    for session, prefix in zip(sessions, prefixes, strict=True):
        small.extend(session, [9])
        prefix.append(9)
    assert_first_two_are_drafted_for(small, oracle, sessions, prefixes)


@pytest.mark.parametrize("width", [1, 2])
def test_without_room_nobody_who_is_drafted_for_loses_a_cache(folder: Path, oracle: Any, width: int) -> None:
    """Of asks that do not fit together the last ones go without; those that are ahead of them are not drafted anew."""
    small, prefixes, sessions = crowded(folder, 3)
    small.warm(sessions[0])
    assert_first_two_are_drafted_for(small, oracle, sessions, prefixes, width)


def crowded(folder: Path, count: int) -> tuple[NeuralDrafter, list[list[int]], list[NeuralSession]]:
    """A drafter with room for two caches, and more prefixes with their sessions than that."""
    small = neural(folder, kv_capacity_tokens=1024)  # two pages of 512
    prefixes = [[n, n + 1, n + 2] for n in range(count)]
    return small, prefixes, [small.open(prefix, GREEDY) for prefix in prefixes]


def assert_first_two_are_drafted_for(
    small: NeuralDrafter, oracle: Any, sessions: list[NeuralSession], prefixes: list[list[int]], width: int = 1
) -> None:
    answers = small.propose([Ask(session, 3, width) for session in sessions])
    assert [bool(chains) for chains in answers] == [index < 2 for index in range(len(sessions))]
    for chains, prefix in zip(answers, prefixes, strict=True):
        assert all(chain.token_ids == continuation(oracle, prefix, 3, GREEDY) for chain in chains[:1])
    close(small, *sessions)


def test_a_branch_that_has_ended_is_not_drafted_on(drafter: NeuralDrafter, oracle: Any) -> None:
    """The first branch is kept as the path for the next ask, and that it ended is kept with it."""
    prefix = [4, 5, 6]
    text = continuation(oracle, prefix, 3, GREEDY)
    session = drafter.open(prefix, dataclasses.replace(GREEDY, stop_token_ids=frozenset(text[1:2])))
    for width in (2, 1):
        (chains,) = drafter.propose([Ask(session, 5, width)])
        assert chains[0].token_ids == text[:2]
    drafter.close(session)


def test_warming_prefills_all_but_the_last_token(drafter: NeuralDrafter, oracle: Any) -> None:
    """What is done while idle changes no proposal; it comes in pieces of one chunk, so that asks need not wait."""
    prefix = list(range(20, 50))
    session = drafter.open(prefix, GREEDY)
    lengths = []
    for more in (True, True, True, True, False):
        assert drafter.warm(session) is more
        lengths.append(session.cache.length)
    assert lengths == [7, 14, 21, 28, len(prefix) - 1]
    assert drafter.warm(session) is False
    assert chain_ids(drafter, session, 3) == continuation(oracle, prefix, 3, GREEDY)
    drafter.close(session)


def test_an_ask_may_come_between_two_pieces_of_warming(drafter: NeuralDrafter, oracle: Any) -> None:
    """Drafting goes on from what is prefilled, for the session itself and for others; there is nothing left to warm."""
    prefix, other_prefix = list(range(50, 80)), [1, 2, 3]
    session, other = drafter.open(prefix, GREEDY), drafter.open(other_prefix, GREEDY)
    assert drafter.warm(session)
    assert chain_ids(drafter, other, 3) == continuation(oracle, other_prefix, 3, GREEDY)
    assert drafter.warm(session)
    assert chain_ids(drafter, session, 3) == continuation(oracle, prefix, 3, GREEDY)
    assert drafter.warm(session) is False
    close(drafter, session, other)


def test_facts_and_options(folder: Path, drafter: NeuralDrafter) -> None:
    """The description names the model's tokenizer and limits; a limit below the model's own is kept."""
    assert drafter.model_info is not None
    assert (drafter.model_info.vocab_size, drafter.context_limit) == (VOCAB, CONTEXT)
    assert neural(folder, context_limit=10, family="alike").context_limit == 10
    with pytest.raises(ConfigError, match="min_confidence"):
        neural(folder, min_confidence=1.5)
    with pytest.raises(ConfigError, match="needs option model"):
        create("neural", {})


@pytest.mark.parametrize("first_width", [1, 3])
def test_a_prefix_that_ends_where_a_draft_stopped_is_drafted_for(folder: Path, first_width: int) -> None:
    """All of a path may have been fed when it stops; committed as it is, its last id is fed again for its row."""
    careful, free = neural(folder, min_confidence=0.5, batch_invariant=False), neural(folder, batch_invariant=False)
    stopped = 0
    for start in range(16):
        prefix = [start, 5, 6]
        session = careful.open(prefix, GREEDY)
        (chains,) = careful.propose([Ask(session, 8, first_width)])
        drafted = chains[0].token_ids if chains else ()
        careful.extend(session, drafted)
        (again,) = careful.propose([Ask(session, 4)])
        (unbounded,) = free.propose([Ask(free.open([*prefix, *drafted], GREEDY), 4)])
        sure = [byte >= 127.5 for byte in unbounded[0].confidences]
        expected = unbounded[0].token_ids[: [*sure, False].index(False)]
        assert (again[0].token_ids if again else ()) == expected
        stopped += not expected
    assert stopped > 3


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose context is longer than a page of its cache."""
    return make_tiny_model(tmp_path_factory.mktemp("long") / "model", context=1024)


def test_steps_ahead_are_the_chain_and_their_cache_is_kept(long: Path) -> None:
    """One token at a time, asked or ahead, gives the chain of one ask, and each token is fed once."""
    drafter = neural(long)
    session, other = drafter.open([5, 6, 7], GREEDY), drafter.open([5, 6, 7], GREEDY)
    (expected,) = drafter.propose([Ask(other, 9)])[0]
    for length in range(1, 10):
        (got,) = drafter.propose([Ask(session, length, is_ahead=length > 4)])[0]
        assert got.token_ids == expected.token_ids[:length]
        assert session.cache.length == 3 + length - 1
    drafter.extend(session, [*expected.token_ids[:5], 3])
    assert session.cache.length == 3 + 5


def test_drafting_ahead_evicts_nobody(long: Path) -> None:
    """Where the cache is full, a session that drafts ahead waits, and can be drafted for as soon as it asks."""
    drafter = neural(long, kv_capacity_tokens=1024)  # two pages of 512
    first, second = drafter.open([1] * 510, GREEDY), drafter.open([2, 3], GREEDY)
    (before,) = drafter.propose([Ask(first, 2), Ask(second, 2)])[0]
    kept = second.cache.length
    # The next page of `first` would have to be that of `second`.
    for length in range(3, 6):
        (got,) = drafter.propose([Ask(first, length, is_ahead=True)])[0]
    assert second.cache.length == kept
    assert len(got.token_ids) < 5
    assert got.token_ids[:2] == before.token_ids
    (asked,) = drafter.propose([Ask(first, 5)])[0]
    assert len(asked.token_ids) == 5
    assert second.cache.length == 0
    # Its cache is gone, so nothing is read again for what nobody asked for.
    assert len(drafter.propose([Ask(second, 3, is_ahead=True)])[0][0].token_ids) == 2
    assert second.cache.length == 0
