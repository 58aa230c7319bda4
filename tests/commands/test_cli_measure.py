"""The demo's arithmetic: what counts as identical, as speed, as accepted."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.client import Piece, StreamedAnswer
from moot.commands.measure import COMPARISON_HEADER, DRAFTER_HEADER, Comparison, Sample

SPECULATIVE = {
    "num_drafts": 4,
    "num_draft_tokens": 10,
    "num_accepted_tokens": 6,
    "drafters": {"suffix": {"num_proposed_tokens": 9, "num_accepted_tokens": 5, "num_votes_won": 3}},
}


def sample(ids: tuple[int, ...] = (1, 2, 3), drafting: bool = True, prompt: str = "p", seconds: float = 1.0) -> Sample:
    return Sample(prompt, drafting, ids, "", len(ids) - 1, seconds, 4, 10, 6, SPECULATIVE["drafters"])  # type: ignore[arg-type]


def test_decoding_is_timed_after_the_first_piece() -> None:
    """Prefill is not decoding: tokens of the first piece do not count, nor does the time before it."""
    pieces = [Piece(10.0, "a", [1]), Piece(10.5, "b", [2, 3]), Piece(11.0, "", [4])]
    made = Sample.of("p", True, StreamedAnswer(pieces, "stop", {"speculative_decoding": SPECULATIVE}))
    assert (made.token_ids, made.num_timed_tokens, made.decode_s, made.tokens_per_s) == ((1, 2, 3, 4), 3, 1.0, 3.0)


def test_an_answer_of_one_piece_has_no_speed() -> None:
    """Nothing was timed, so nothing is divided."""
    answer = StreamedAnswer([Piece(1.0, "a", [1])], "stop", {"speculative_decoding": SPECULATIVE})
    assert Sample.of("p", True, answer).tokens_per_s == 0.0
    with pytest.raises(ValueError, match="empty"):
        Sample.of("p", True, StreamedAnswer())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_identical_means_every_id_and_no_more(left: list[int], right: list[int]) -> None:
    """A longer answer that begins alike is another answer; the position named is the first that differs."""
    comparison = Comparison.of([sample(tuple(left), drafting=False), sample(tuple(right))])
    place = comparison.first_difference("p")
    assert comparison.identical == (left == right) == (place is None)
    if place is not None:
        assert left[:place] == right[:place]
        assert left[place : place + 1] != right[place : place + 1]


def test_all_repetitions_must_agree() -> None:
    """Two runs without drafting that differ are as wrong as one with it."""
    same = [sample(drafting=drafting) for drafting in (True, False, True)]
    assert Comparison.of(same).identical
    assert not Comparison.of([*same, sample((1, 9, 3), drafting=False)]).identical


def test_numbers_of_a_comparison() -> None:
    """Medians over repetitions; a repetition's speed is all its tokens over all its time, not a mean of speeds."""
    off, on = {"p": [2.0], "q": [8.0]}, {"p": [1.0, 2.0, 1.0], "q": [4.0, 3.0, 1.0]}
    samples = [
        dataclasses.replace(sample(prompt=prompt, drafting=drafting), num_timed_tokens=10, decode_s=seconds)
        for drafting, times in ((False, off), (True, on))
        for prompt, listed in times.items()
        for seconds in listed
    ]
    comparison = Comparison.of(samples)
    plain, drafted = comparison.speeds
    assert (plain.median, drafted.median, drafted.low, drafted.high) == (2.0, 4.0, 4.0, 10.0)
    assert comparison.speed_up == 2.0
    assert comparison.acceptance_rate == pytest.approx(0.6)
    assert comparison.mean_acceptance_length == pytest.approx(2.5)
    assert comparison.drafter_rows() == [["suffix", "54", "30", "18"]]
    assert len(comparison.row("all")) == len(COMPARISON_HEADER)
    assert len(comparison.drafter_rows()[0]) == len(DRAFTER_HEADER)
