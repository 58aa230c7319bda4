"""The kinds that live from what a request brings: where the output is taken to be, and whose words are copied."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import ConfigError
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import NO_REQUEST_CONTEXT, Ask, Drafter, RequestContext
from moot.drafters.registry import REQUEST_KINDS, create
from moot.drafters.request.siblings import Siblings

VOCAB = 300
PARAMS = SamplingParams(temperature=0.0)
PROMPT = [7, 8, 9]
# Few distinct ids, so that places are mistaken; some lie outside the drafter's vocabulary.
few = st.lists(st.integers(0, 6) | st.just(VOCAB + 1), max_size=40)


def predicting(prediction: Sequence[int], output: Sequence[int] = (), **options: Any) -> tuple[Drafter[Any], Any]:
    drafter = create("prediction", {"vocab_size": VOCAB, **options})
    request_context = RequestContext(len(PROMPT), tuple(prediction))
    return drafter, drafter.open_request([*PROMPT, *output], PARAMS, request_context)


def next_ids(drafter: Drafter[Any], session: Any, num_tokens: int, width: int = 1) -> list[tuple[int, ...]]:
    return [chain.token_ids for chain in drafter.propose([Ask(session, num_tokens, width)])[0]]


def text(name: str) -> list[int]:
    return [ord(letter) for letter in name]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", "the ca"),
        ("the cat sat", " on th"),
        ("the dog", " sat o"),  # as many ids written as replaced
        ("the dog s", "at on "),
        ("the big black cat s", "at on "),  # inserted: the nearest place where "cat s" goes on
        ("the cat on", " the m"),  # left out
        ("the cat sat on the mat. the ", "end."),  # words that occur twice: the place after the last sure one
        ("the cat sat on the mat. the end.", ""),  # used up
        ("the cat sat on the mat. the end. the cat s", "at on "),  # begun again, before the last sure place
    ],
)
def test_the_output_is_found_again_after_an_edit(output: str, expected: str) -> None:
    """The proposal is what follows the place at which the output has arrived: nearest behind the last sure one."""
    drafter, session = predicting(text("the cat sat on the mat. the end."), text(output))
    chains = next_ids(drafter, session, len(expected) or 6)
    assert chains == ([tuple(text(expected))] if expected else [])


def test_a_word_met_by_chance_does_not_lose_the_place() -> None:
    """A long insertion whose ids occur far behind: once the output is back, so is the place before them."""
    prediction = [1, 2, 3, 4, 5, 6, 7, 8, *range(20, 60), 101, 102, 103]
    drafter, session = predicting(prediction, [1, 2, 3, 4, 5, 101, 250, 102, 251, 103, 252, 6])
    assert next_ids(drafter, session, 3) == [(7, 8, 20)]


def test_width_gives_other_places() -> None:
    """Further proposals begin with other ids, each from a place that the last ids of the output speak for."""
    drafter, session = predicting([1, 5, 2, 5, 3, 5, 4], [1, 5])
    assert next_ids(drafter, session, 2, width=3) == [(2, 5), (3, 5), (4,)]


@given(prediction=few, output=few, cuts=st.lists(st.integers(0, 43), max_size=4), num_tokens=st.integers(1, 9))
@settings(max_examples=200)
def test_prediction_proposals_are_valid_and_a_function_of_the_prefix(
    prediction: list[int], output: list[int], cuts: list[int], num_tokens: int
) -> None:
    """However the prefix arrived and whatever was asked on the way: the same different chains, of known ids only."""
    prefix = [*PROMPT, *output]
    drafter, fresh = predicting(prediction, output)
    bounds = sorted({0, *(min(cut, len(prefix)) for cut in cuts), len(prefix)})
    session = drafter.open_request([], PARAMS, RequestContext(len(PROMPT), tuple(prediction)))
    for start, end in pairwise(bounds):
        drafter.extend(session, prefix[start:end])
        drafter.propose([Ask(session, 3, 2)])
    grown, whole = drafter.propose([Ask(session, num_tokens, 3), Ask(fresh, num_tokens, 3)])
    assert grown == whole
    assert len({chain.token_ids[0] for chain in whole}) == len(whole) <= 3
    for chain in whole:
        assert 1 <= len(chain.token_ids) == len(chain.confidences) <= num_tokens
        assert all(0 <= token < VOCAB for token in chain.token_ids)
        assert all(0 <= byte <= 255 for byte in chain.confidences)


def test_an_edited_text_takes_few_rounds() -> None:
    """A usefulness floor: an answer in which every twentieth token was changed, left out or put in is foreseen."""
    rng = random.Random(5)
    prediction = [rng.randrange(VOCAB) for _ in range(400)]
    answer: list[int] = []
    for token in prediction:
        edit = rng.choice(["change", "drop", "insert"]) if rng.random() < 0.05 else ""
        answer += {"": [token], "change": [rng.randrange(VOCAB)], "drop": []}.get(edit, [rng.randrange(VOCAB), token])
    drafter, session = predicting(prediction)
    rounds = done = 0
    while done < len(answer):
        chains = next_ids(drafter, session, 8)
        new = answer[done : done + 1]
        for expected in chains[0] if chains else ():
            if expected != new[-1]:
                break
            new = answer[done : done + len(new) + 1]
        drafter.extend(session, new)
        done, rounds = done + len(new), rounds + 1
    assert rounds < len(answer) / 4


def test_past_its_context_a_prediction_is_let_go() -> None:
    """Memory of a session is bounded: past the limit what was held is freed, and no proposal comes."""
    drafter, session = predicting([1] * 100, [1] * 28, context_limit=32)
    assert next_ids(drafter, session, 8) == [(1,)]
    drafter.extend(session, [1, 1])
    assert next_ids(drafter, session, 8) == []
    assert len(session.text) == len(session.tail) == 0


@pytest.mark.parametrize("kind", REQUEST_KINDS)
def test_without_material_a_request_kind_has_no_vote_and_abstains(kind: str) -> None:
    """It is no part of a request that does not bring what it lives from; elsewhere it says nothing."""
    drafter = create(kind, {"vocab_size": VOCAB})
    assert not drafter.serves(NO_REQUEST_CONTEXT)
    assert drafter.propose([Ask(drafter.open([1, 2, 1, 2, 1], PARAMS), 4, 2)]) == [[]]


@pytest.mark.parametrize(
    ("kind", "options"), [("prediction", {"max_match": 0}), ("sibling", {"min_match": 5, "max_match": 4})]
)
def test_options_that_cannot_work_are_named(kind: str, options: dict[str, int]) -> None:
    """ConfigError with the option's name."""
    with pytest.raises(ConfigError, match="match"):
        create(kind, {"vocab_size": VOCAB, **options})


class Choices:
    """The sessions of the choices of one prompt."""

    def __init__(self, num_choices: int, prompt: Sequence[int] = PROMPT, **options: Any) -> None:
        self.drafter = create("sibling", {"vocab_size": VOCAB, **options})
        self.siblings = Siblings(num_choices)
        self.prompt = prompt
        self.sessions = [self.open(index) for index in range(num_choices)]

    def open(self, index: int, output: Sequence[int] = ()) -> Any:
        request_context = RequestContext(len(self.prompt), (), self.siblings, index)
        return self.drafter.open_request([*self.prompt, *output], PARAMS, request_context)

    def say(self, index: int, *token_ids: int) -> None:
        self.drafter.extend(self.sessions[index], token_ids)

    def ask(self, index: int, num_tokens: int = 4, width: int = 1) -> list[Proposal]:
        return self.drafter.propose([Ask(self.sessions[index], num_tokens, width)])[0]

    def ids(self, index: int, num_tokens: int = 4, width: int = 1) -> list[tuple[int, ...]]:
        return [chain.token_ids for chain in self.ask(index, num_tokens, width)]


def test_who_is_behind_copies_from_who_is_ahead() -> None:
    """Equal texts, as at temperature 0: the one behind is told what the other has said, and nothing the other way."""
    choices = Choices(2)
    choices.say(0, 50, 51, 52, 53, 54)
    choices.say(1, 50)
    assert choices.ids(1) == [(51, 52, 53, 54)]
    assert choices.ids(0) == []
    choices.say(1, 51, 52, 53, 54, 55)
    assert choices.ids(0) == [(55,)]


def test_the_longest_match_wins_then_the_most_frequent_word() -> None:
    """Two ids of context beat one; among equal matches the majority of the siblings, then the lowest id."""
    choices = Choices(5)
    choices.say(0, 10, 20, 30)
    choices.say(1, 11, 20, 31)
    choices.say(2, 12, 20, 32)
    choices.say(3, 13, 20, 32)
    for last, expected in ((10, 30), (11, 31), (99, 32)):
        choices.sessions[4] = choices.open(4, [last, 20])
        assert choices.ids(4, 1) == [(expected,)]
    assert choices.ids(4, 1, width=3) == [(32,), (30,), (31,)]
    (chain,) = choices.ask(4, 1)
    assert chain.confidences == (int(15 * 0.5),)


def test_a_choice_never_copies_itself_and_stops_where_the_others_do() -> None:
    """Its own words are the suffix drafter's part; behind the end of a text comes nothing of the next one."""
    choices = Choices(3)
    choices.say(0, 60, 61, 60)
    assert choices.ids(0) == []
    choices.say(1, 60, 62)
    choices.say(2, 63, 60, 62, 64)
    assert choices.ids(0) == [(62, 64)]
    choices.drafter.close(choices.sessions[2])
    assert choices.ids(0) == [(62, 64)]


def test_a_session_opened_again_writes_its_row_anew() -> None:
    """A drafter that is taken up again after a failure does not say everything twice."""
    choices = Choices(2)
    choices.say(0, 70, 71)
    choices.sessions[0] = choices.open(0, [70, 71, 72])
    choices.say(1, 70)
    assert choices.ids(1) == [(71, 72)]


@given(
    said=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4) | st.just(VOCAB), max_size=6)), max_size=30),
    width=st.integers(1, 3),
)
@settings(max_examples=150)
def test_sibling_proposals_are_the_others_words(said: list[tuple[int, list[int]]], width: int) -> None:
    """Against a search by hand: each chain follows, in some other row, the longest end that leads to its first id."""
    prompt = [1, 2]
    choices = Choices(4, prompt, max_match=3)
    rows = [list(prompt) for _ in range(4)]
    for index, token_ids in said:
        choices.say(index, *token_ids)
        rows[index] += token_ids
    for index in range(4):
        own, found = rows[index], choices.ids(index, 3, width)
        assert len(found) == len({chain[0] for chain in found}) <= width
        best = 0
        for size in range(1, min(3, len(own)) + 1):
            if followers(rows, index, own[-size:]):
                best = size
        if best == 0:
            assert found == []
            continue
        words = followers(rows, index, own[-best:])
        best_word = max(sorted(set(words)), key=words.count)
        assert [chain[0] for chain in found][:1] == (
            [best_word] if best_word < VOCAB else [found[0][0]] if found else []
        )
        for chain in found:
            assert any(chain[1:2] in ((), tuple(row[i + 1 : i + 2])) for row in rows for i in positions(row, chain[0]))


def positions(row: list[int], token: int) -> list[int]:
    return [i for i, other in enumerate(row) if other == token]


def followers(rows: list[list[int]], own: int, tail: list[int]) -> list[int]:
    """What comes after `tail` in the other rows."""
    size = len(tail)
    return [
        row[i + size]
        for index, row in enumerate(rows)
        if index != own
        for i in range(len(row) - size)
        if row[i : i + size] == tail
    ]


def test_rows_grow_by_what_is_written() -> None:
    """Four bytes a token and choice, at most doubled; a request whose choices say nothing holds nothing."""
    siblings = Siblings(64)
    assert siblings._rows.nbytes == 0
    for _ in range(40):
        siblings.append(3, list(range(100)))
    assert siblings._rows.nbytes <= 2 * 64 * 4002 * 4
    assert siblings.tokens(3, 3) == [97, 98, 99]
