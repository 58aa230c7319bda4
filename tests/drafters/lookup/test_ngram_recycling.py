"""Back-off tables and token recycling."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import ConfigError
from moot.core.types import SamplingParams
from moot.drafters.interface import MAX_VOCAB_SIZE, Ask, window_start
from moot.drafters.lookup.ngram import NgramTable
from moot.drafters.registry import create

texts = st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=4)


@given(stored=texts, context=st.lists(st.integers(0, 5), min_size=1, max_size=3))
@settings(max_examples=150)
def test_table_counts_what_followed(
    tmp_path_factory: pytest.TempPathFactory, stored: list[list[int]], context: list[int]
) -> None:
    """Counts of every context equal a count by hand, also after saving and loading."""
    path = tmp_path_factory.mktemp("table") / "table.npz"
    NgramTable.build(stored, num_successors=2).save(path)
    found = NgramTable.load(path).lookup(context)
    size = len(context)
    counts = Counter(
        text[end] for text in stored for end in range(size, len(text)) if text[end - size : end] == context
    )
    if not counts:
        assert found is None
        return
    assert found is not None
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:2]
    assert found.token_ids == tuple(ranked)
    assert found.counts == tuple(counts[token] for token in ranked)
    assert found.total == sum(counts.values())


def test_table_refuses_ids_it_cannot_hold(tmp_path: Path) -> None:
    """An id too large for its packed keys is refused when building and unknown when asked for."""
    with pytest.raises(ConfigError, match="holds ids"):
        NgramTable.build([[1, MAX_VOCAB_SIZE]])
    assert NgramTable.build([[1, 2, 3]]).lookup([MAX_VOCAB_SIZE + 1]) is None
    assert NgramTable.build([[1, 2, 3]]).lookup([2**32 - 1, 2**32 - 1, 2**32 - 1]) is None
    (tmp_path / "bad.npz").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="cannot open n-gram table"):
        NgramTable.load(tmp_path / "bad.npz")


def test_longest_context_decides() -> None:
    """Back-off: what followed three tokens goes before what more often followed one."""
    drafter = create("ngram", {"vocab_size": 10})
    session = drafter.open([1, 2, 3, 9, 3, 5, 3, 5, 3, 5, 1, 2, 3], SamplingParams())
    chains = drafter.propose([Ask(session, 1, 2)])[0]
    assert [chain.token_ids for chain in chains] == [(9,), (5,)]
    assert chains[0].confidences[0] >= 3 * 64 > 2 * 64 > chains[1].confidences[0]


@given(prefix=st.lists(st.integers(0, 3), min_size=1, max_size=60), cut=st.integers(0, 60))
@settings(max_examples=150)
def test_counts_are_of_the_last_tokens(prefix: list[int], cut: int) -> None:
    """Online, the most frequent follower (the most recent of equals) within the window, and nothing before it."""
    window = 12
    drafter = create("ngram", {"vocab_size": 4, "max_indexed_tokens": window})
    session = drafter.open(prefix[:cut], SamplingParams())
    drafter.extend(session, prefix[cut:])
    indexed = prefix[window_start(len(prefix), window) :]
    assert min(len(prefix), window // 2) <= len(indexed) <= window
    expected: list[tuple[int, ...]] = []
    for size in (3, 2, 1):
        ends = [end for end in range(size, len(indexed)) if indexed[end - size : end] == indexed[-size:]]
        if size <= len(indexed) and ends:
            counts, latest = Counter(indexed[end] for end in ends), {indexed[end]: end for end in ends}
            expected.append((max(counts, key=lambda token: (counts[token], latest[token])),))
            break
    assert [chain.token_ids for chain in drafter.propose([Ask(session, 1)])[0]] == expected


def test_trained_table_is_used_and_learns_nothing(tmp_path: Path) -> None:
    """With a table, proposals are its, and a session holds no counts of its own."""
    NgramTable.build([[1, 2, 3, 4], [2, 3, 4]]).save(tmp_path / "t.npz")
    drafter = create("ngram", {"vocab_size": 10, "table": tmp_path / "t.npz"})
    session = drafter.open([7, 7, 7, 2], SamplingParams())
    assert drafter.propose([Ask(session, 8)])[0][0].token_ids == (3, 4)
    assert session.learned == {}


def test_recycling_follows_the_targets_candidates() -> None:
    """The committed id first, then what else the target found likely there; chains start from each in order."""
    drafter = create("recycling", {"vocab_size": 50})
    session = drafter.open([1], SamplingParams())
    drafter.extend(session, [2, 3, 1], [(2, 20, 21), (30, 3), (1, 4)])
    chains = drafter.propose([Ask(session, 3, 4)])[0]
    assert [chain.token_ids for chain in chains] == [(2, 3, 1), (20,), (21,)]


def test_recycling_starts_from_prompt_bigrams() -> None:
    """Before the first verification the prompt's own bigrams fill the table; the last seen one leads."""
    drafter = create("recycling", {"vocab_size": 50})
    session = drafter.open([5, 6, 5, 7, 5], SamplingParams())
    assert [c.token_ids for c in drafter.propose([Ask(session, 2, 2)])[0]] == [(7, 5), (6, 5)]


def test_recycling_confidence_counts_confirmations() -> None:
    """A successor that was seen several times in a row ranks above one seen once."""
    drafter = create("recycling", {"vocab_size": 50})
    once = drafter.open([1, 2, 1], SamplingParams())
    often = drafter.open([1, 2] * 6 + [1], SamplingParams())
    first, second = (chains[0] for chains in drafter.propose([Ask(once, 1), Ask(often, 1)]))
    assert second.confidences > first.confidences


def test_shared_rows_are_bounded_and_only_a_fallback() -> None:
    """The table of all sessions keeps the most recently used rows; without the option nothing is shared."""
    drafter = create("recycling", {"vocab_size": 50, "shared_rows": 2})
    drafter.open([1, 2, 3, 4, 5], SamplingParams())
    other = drafter.open([3], SamplingParams())
    assert drafter.propose([Ask(other, 3)])[0][0].token_ids == (4, 5)
    assert drafter.propose([Ask(drafter.open([1], SamplingParams()), 3)]) == [[]]
    own = drafter.open([3, 9, 3], SamplingParams())
    assert drafter.propose([Ask(own, 1)])[0][0].token_ids == (9,)
    private = create("recycling", {"vocab_size": 50})
    private.open([3, 4], SamplingParams())
    assert private.propose([Ask(private.open([3], SamplingParams()), 1)]) == [[]]
