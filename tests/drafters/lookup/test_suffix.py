"""The suffix automaton and the datastore against searches that try everything."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import ConfigError
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask
from moot.drafters.lookup.datastore import DEPTH, Datastore, build
from moot.drafters.lookup.suffix import SuffixAutomaton
from moot.drafters.registry import create

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def earlier_ends(tokens: list[int], length: int) -> list[int]:
    """Ends (index of the last token) of earlier occurrences of the text's last `length` tokens."""
    pattern = tokens[len(tokens) - length :]
    return [end for end in range(length - 1, len(tokens) - 1) if tokens[end - length + 1 : end + 1] == pattern]


def longest_match(tokens: list[int]) -> int:
    return max((n for n in range(1, len(tokens)) if earlier_ends(tokens, n)), default=0)


def suffix_chains(tokens: list[int], num_tokens: int, width: int = 1, **options: object) -> list[Proposal]:
    drafter = create("suffix", {"vocab_size": 100, **options})
    return drafter.propose([Ask(drafter.open(tokens, SamplingParams()), num_tokens, width)])[0]


@given(tokens=texts)
@settings(max_examples=300)
def test_automaton_knows_the_longest_earlier_suffix(tokens: list[int]) -> None:
    """Length, number of occurrences and most recent end of the match, at every prefix of the text."""
    automaton = SuffixAutomaton()
    for end in range(1, len(tokens) + 1):
        automaton.append(tokens[end - 1])
        prefix = tokens[:end]
        state, length = automaton.match(), longest_match(prefix)
        assert automaton.length[state] == length
        while state != 0:
            assert automaton.count[state] == len(earlier_ends(prefix, automaton.length[state])) + 1
            assert automaton.end[state] == end - 1
            state = automaton.shorter(state)


def test_automaton_stays_small() -> None:
    """At most two states and three transitions per token."""
    automaton = SuffixAutomaton()
    for index in range(3000):
        automaton.append(index * index % 7 + index % 11)
    assert len(automaton.length) <= 2 * len(automaton)
    assert sum(len(transitions) for transitions in automaton.next) <= 3 * len(automaton)


@given(tokens=texts)
@settings(max_examples=300)
def test_first_id_continues_the_longest_match(tokens: list[int]) -> None:
    """`recent`: the id after the most recent match; `frequent`: the most frequent one, the most recent among equals."""
    length = longest_match(tokens)
    ends = earlier_ends(tokens, length) if length else []
    recent, frequent = suffix_chains(tokens, 1, prefer="recent"), suffix_chains(tokens, 1)
    if not ends:
        assert recent == frequent == []
        return
    assert recent[0].token_ids == (tokens[ends[-1] + 1],)
    last_seen = {tokens[end + 1]: end for end in ends}
    counts = Counter(tokens[end + 1] for end in ends)
    assert frequent[0].token_ids == (max(counts, key=lambda token: (counts[token], last_seen[token])),)


@given(tokens=texts, width=st.integers(2, 4))
@settings(max_examples=100)
def test_chains_part_at_the_first_id_and_start_with_seen_bigrams(tokens: list[int], width: int) -> None:
    """Alternatives have other first ids, each of which has followed the last token before."""
    chains = suffix_chains(tokens, 3, width)
    first_ids = [chain.token_ids[0] for chain in chains]
    followers = {b for a, b in pairwise(tokens) if a == tokens[-1]}
    assert len(set(first_ids)) == len(first_ids)
    assert set(first_ids) <= followers
    assert len(first_ids) == min(width, len(followers))


@given(tokens=st.lists(st.integers(0, 3), min_size=30, max_size=120))
@settings(max_examples=100)
def test_window_is_bounded_and_answers_as_its_own_text(tokens: list[int]) -> None:
    """Only the last tokens are indexed; the proposal is that of this window alone."""
    drafter = create("suffix", {"vocab_size": 4, "max_indexed_tokens": 16})
    session = drafter.open([], SamplingParams())
    for token in tokens:
        drafter.extend(session, [token])
        assert len(session.tokens) == len(session.automaton) <= 16
    assert len(session.tokens) > 8
    assert drafter.propose([Ask(session, 5)])[0] == suffix_chains(tokens[session.start :], 5)


def test_confidence_grows_with_the_match_and_its_support() -> None:
    """A long match is a higher bin than a short one; an undisputed continuation higher than a disputed one."""
    long = suffix_chains([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6], 1)[0].confidences[0]
    short = suffix_chains([1, 9, 1], 1)[0].confidences[0]
    disputed = suffix_chains([1, 9, 1, 8, 1], 1)[0].confidences[0]
    assert long > short > disputed


@pytest.fixture
def store(tmp_path: Path) -> Datastore:
    build([[1, 2, 3, 4], [9, 2, 3, 5], [8, 2, 3, 5, 6]], tmp_path / "store")
    return Datastore(tmp_path / "store")


def test_datastore_continues_with_the_most_frequent(store: Datastore) -> None:
    """Longest match first, then id by id what most of its occurrences did."""
    found = store.continuation([7, 2, 3], 3)
    assert (found.match_length, found.support, found.token_ids) == (2, 3, (5, 6))
    assert found.shares == (2 / 3, 1 / 2)
    assert store.continuation([1, 2, 3], 3).token_ids == (4,)
    assert store.continuation([77], 3).match_length == 0
    assert len(store) == 13


@given(
    stored=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4),
    prefix=st.lists(st.integers(0, 4), max_size=24),
)
@settings(max_examples=150)
def test_datastore_finds_the_longest_match_and_all_its_places(
    tmp_path_factory: pytest.TempPathFactory, stored: list[list[int]], prefix: list[int]
) -> None:
    """Match length (up to the depth of the order), support and first id equal a search through all texts."""
    path = tmp_path_factory.mktemp("store") / "store"
    if not any(stored):
        with pytest.raises(ConfigError, match="a datastore holds"):
            build(stored, path)
        return
    build(stored, path)
    found = Datastore(path).continuation(prefix, 1)
    for length in range(min(len(prefix), DEPTH), 0, -1):
        pattern = prefix[len(prefix) - length :]
        followers = [
            text[end] for text in stored for end in range(length, len(text)) if text[end - length : end] == pattern
        ]
        if followers:
            counts = Counter(followers)
            best = min(counts, key=lambda token: (-counts[token], token))
            assert (found.match_length, found.support) == (length, len(followers))
            assert found.token_ids == (best,)
            assert found.shares == (counts[best] / len(followers),)
            return
    assert found.match_length == 0
    assert found.token_ids == ()


@given(
    stored=st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=6).filter(any),
    prefix=st.lists(st.integers(0, 2), max_size=6),
    num_tokens=st.integers(0, 7),
)
@settings(max_examples=200)
def test_datastore_goes_on_as_most_of_those_left(
    tmp_path_factory: pytest.TempPathFactory, stored: list[list[int]], prefix: list[int], num_tokens: int
) -> None:
    """All ids and shares of a continuation equal a count over all texts: at each id those that agreed so far are
    asked, the lowest of the most frequent goes on, and no continuation leaves its text."""
    path = tmp_path_factory.mktemp("store") / "store"
    build(stored, path)
    found = Datastore(path).continuation(prefix, num_tokens)
    pattern = prefix[len(prefix) - found.match_length :]
    length = len(pattern)
    rests = [
        text[end:] for text in stored for end in range(length, len(text)) if text[end - length : end] == pattern
    ] * (length > 0)
    assert found.support == len(rests)
    ids: list[int] = []
    shares: list[float] = []
    while len(ids) < num_tokens and (counts := Counter(rest[len(ids)] for rest in rests if len(rest) > len(ids))):
        best = min(counts, key=lambda token: (-counts[token], token))
        shares.append(counts[best] / len(rests))
        rests = [rest for rest in rests if rest[len(ids) : len(ids) + 1] == [best]]
        ids.append(best)
    assert (list(found.token_ids), list(found.shares)) == (ids, shares)


def test_datastore_is_mapped_not_read(tmp_path: Path) -> None:
    """Processes share the file's pages; nothing per token is held in Python."""
    rng = np.random.default_rng(0)
    build([rng.integers(0, 50, 20_000).tolist()], tmp_path / "store")
    store = Datastore(tmp_path / "store")
    assert isinstance(store._tokens, np.memmap)
    assert isinstance(store._order, np.memmap)


def test_longer_match_of_datastore_goes_first(tmp_path: Path) -> None:
    """The source with the longer match leads; the own text wins a tie."""
    build([[1, 2, 3, 4, 5]], tmp_path / "store")
    both = suffix_chains([3, 7, 1, 2, 3], 2, 2, datastore=tmp_path / "store")
    assert [chain.token_ids for chain in both] == [(4, 5), (7, 1)]
    tie = suffix_chains([1, 2, 3, 7, 1, 2, 3], 2, 2, datastore=tmp_path / "store")
    assert [chain.token_ids[0] for chain in tie] == [7, 4]


def test_building_again_replaces_the_store(tmp_path: Path) -> None:
    """A store of another format is refused, never misread."""
    path = tmp_path / "store"
    build([[1, 2]], path)
    build([[3, 4, 5]], path)
    assert Datastore(path).continuation([3], 2).token_ids == (4, 5)
    (path / "meta.json").write_text('{"format": 0}')
    with pytest.raises(ConfigError, match="another format"):
        Datastore(path)
