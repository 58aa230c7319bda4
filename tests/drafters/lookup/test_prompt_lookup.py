"""What prompt lookup copies, against a search through the whole prefix."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.types import SamplingParams
from moot.drafters.interface import Ask
from moot.drafters.lookup.prompt_lookup import copy_from
from moot.drafters.registry import create


def searched(tokens: list[int], num_tokens: int) -> tuple[int, ...]:
    for size in (4, 3, 2, 1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                grown = list(tokens)
                for index in range(num_tokens):
                    grown.append(grown[end + index])
                return tuple(grown[len(tokens) :])
    return ()


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=50), num_tokens=st.integers(1, 8))
@settings(max_examples=300)
def test_longest_ngram_and_most_recent_match_win(tokens: list[int], num_tokens: int) -> None:
    """The longest suffix n-gram from 4 to 1 seen earlier; of its occurrences the most recent; loops go on."""
    drafter = create("prompt_lookup", {"vocab_size": 4})
    chains = drafter.propose([Ask(drafter.open(tokens, SamplingParams()), num_tokens)])[0]
    assert tuple(chain.token_ids for chain in chains) == (
        (expected,) if (expected := searched(tokens, num_tokens)) else ()
    )


def test_confidence_is_the_length_of_the_match() -> None:
    """The byte says how long the matched n-gram is: the vote's calibration bins it."""
    drafter = create("prompt_lookup", {"vocab_size": 10})
    (long,) = drafter.propose([Ask(drafter.open([1, 2, 3, 4, 5, 1, 2, 3, 4], SamplingParams()), 2)])[0]
    (short,) = drafter.propose([Ask(drafter.open([1, 5, 1], SamplingParams()), 2)])[0]
    assert long.confidences == (127, 127)
    assert short.confidences == (31, 31)


def test_width_gives_chains_with_other_first_ids() -> None:
    """Alternatives come from shorter n-grams and never repeat a first id."""
    drafter = create("prompt_lookup", {"vocab_size": 10})
    chains = drafter.propose([Ask(drafter.open([1, 2, 7, 9, 2, 8, 1, 2], SamplingParams()), 2, 3)])[0]
    assert [chain.token_ids[0] for chain in chains] == [7, 8]


def test_copies_past_the_end_repeat_the_period() -> None:
    """A copy that reaches the end of the text reads on in itself."""
    assert copy_from([1, 2, 3], 1, 5) == (2, 3, 2, 3, 2)
