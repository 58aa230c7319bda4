"""One request's state: what is committed, what is counted, what is dropped. Kinds of C03, C06, C09 to C11, C30."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.acceptance import Walk, walk
from moot.core.generation import Generation
from moot.core.types import ROOT, Draft, FinishReason, Proposal, SamplingParams, Verification

PROMPT = (1, 1, 1)
END = 0


def generation(max_tokens: int = 16) -> Generation:
    return Generation(PROMPT, SamplingParams(max_tokens=max_tokens))


def verified(state: Generation, result: Walk) -> Verification:
    return Verification(state.base_length, result.num_accepted, result.output_token_ids, result.finish)


def opened(state: Generation, token: int = 5) -> Generation:
    state.open(Verification(state.base_length, 0, (token,)))
    return state


def broken_invariants(state: Generation) -> str:
    """What names.md promises of the counters; empty when it all holds."""
    if sum(state.num_accepted_tokens_per_position) != state.num_accepted_tokens:
        return "positions do not sum up"
    if not 0 <= state.num_accepted_tokens <= state.num_draft_tokens:
        return "more accepted than drafted"
    if sorted(state.num_accepted_tokens_per_position, reverse=True) != state.num_accepted_tokens_per_position:
        return "a later position accepted more often than an earlier one"
    if state.num_accepted_tokens > len(state.output_token_ids):
        return "more accepted than committed"
    if any(not 0 <= c.num_accepted_tokens <= c.num_proposed_tokens for c in state.drafters.values()):
        return "a drafter had more accepted than it proposed"
    if any(not 0 <= c.num_votes_won <= state.num_rounds for c in state.drafters.values()):
        return "a drafter won more votes than there were rounds"
    return ""


TEXT = (5, 6, 7, 5, 6, 8, END, 5, 6, 7, 5, 6, 8, 5, 5, 6)


@settings(max_examples=150)
@given(st.integers(1, 12), st.booleans(), st.one_of(st.none(), st.integers(1, 12)), st.data())
def test_a_request_ends_where_plain_decoding_does_and_its_counters_add_up(
    max_tokens: int, ignore_end: bool, stop_after: int | None, data: st.DataObject
) -> None:
    """For any drafts: ids are the text up to the first of end, stop and max_tokens, and the invariants hold always."""
    state = generation(max_tokens)
    calls = 0
    while not state.is_finished:
        done = len(state.output_token_ids)
        cut = data.draw(st.integers(0, 6))
        ids: list[int] = list(TEXT[done : done + cut])
        if data.draw(st.booleans()) and ids:
            ids[data.draw(st.integers(0, len(ids) - 1))] = 9
        draft = Draft.chain(tuple(ids)) if calls else Draft()
        result = walk(
            draft,
            lambda node, path, done=done: TEXT[done + len(path)],  # type: ignore[misc]  # bound early
            lambda token, n: token == END and not ignore_end,
            state.num_remaining,
        )
        kept = None if stop_after is None else min(len(result.output_token_ids), stop_after - done)
        stopped = stop_after is not None and done + len(result.output_token_ids) >= stop_after
        verification = verified(state, result)
        if calls == 0:
            state.open(verification, kept, stopped)
        else:
            state.advance(verification, draft, [Proposal(draft.token_ids, drafter_id="a")], ("a",), kept, stopped)
        calls += 1
        assert broken_invariants(state) == ""
        assert state.reject_reason(verification, draft) in ("stale", "finished")
    ends = [max_tokens] + ([stop_after] if stop_after else []) + ([] if ignore_end else [TEXT.index(END) + 1])
    assert tuple(state.output_token_ids) == TEXT[: min(ends)]
    assert state.num_rounds == calls - 1
    by_length = min(ends) == max_tokens and max_tokens not in ends[1:]
    assert state.finish_reason is (FinishReason.LENGTH if by_length else FinishReason.STOP)


def test_the_opening_is_not_a_round() -> None:
    """The first token comes from prefill: committed, and counted neither as a round nor as drafted or accepted."""
    state = opened(generation())
    assert state.output_token_ids == [5]
    assert (state.num_rounds, state.num_draft_tokens, state.num_accepted_tokens) == (0, 0, 0)
    assert state.acceptance_rate is None
    assert state.mean_acceptance_length is None


@pytest.mark.parametrize("parents", [(ROOT, 0, 1, 2), (ROOT, ROOT, 1, 1)], ids=["chain", "tree"])
def test_a_round_counts_the_next_token_in_neither(parents: tuple[int, ...]) -> None:
    """Draft of four, two accepted: four drafted, two accepted, three committed; acceptance length 3. A tree counts
    every node that was verified, and positions by depth, not by index."""
    state = opened(generation())
    ids = (6, 7, 5) if parents[1] == 0 else (7, 9, 5)
    done = state.advance(Verification(4, 2, ids), Draft((6, 7, 8, 9), parents))
    assert (done.output_token_ids, done.num_accepted, done.finish_reason) == (ids, 2, None)
    assert (state.num_draft_tokens, state.num_accepted_tokens) == (4, 2)
    assert state.num_accepted_tokens_per_position == [1, 1]
    assert state.acceptance_rate == 0.5
    assert state.mean_acceptance_length == 3.0


def test_no_draft_is_plain_decoding_by_the_same_code() -> None:
    """K = 0: a round of one token, nothing drafted, no division by zero (C30)."""
    state = opened(generation())
    state.advance(Verification(4, 0, (6,)), Draft())
    assert (state.num_rounds, state.num_draft_tokens, state.acceptance_rate) == (1, 0, None)
    assert state.mean_acceptance_length == 1.0


@pytest.mark.parametrize("place", range(1, 10))
def test_a_stop_inside_the_block_cuts_text_and_counters_at_the_same_token(place: int) -> None:
    """C09: K = 8 all accepted, the stop string ends with token `place` of nine: nothing after it counts anywhere."""
    state = opened(generation(32))
    ids = (6, 7, 8, 9, 6, 7, 8, 9)
    proposals = [Proposal(ids, drafter_id="a"), Proposal(ids[:3], drafter_id="b")]
    done = state.advance(Verification(4, 8, (*ids, 5)), Draft.chain(ids), proposals, ("a",), place, stopped=True)
    assert done.finish_reason is state.finish_reason is FinishReason.STOP
    assert state.output_token_ids == [5, *(*ids, 5)[:place]]
    assert state.num_accepted_tokens == done.num_accepted == min(place, 8)
    assert state.num_accepted_tokens_per_position == [1] * min(place, 8)
    assert state.drafters["a"].num_accepted_tokens == min(place, 8)
    assert state.drafters["b"].num_accepted_tokens == min(place, 3)
    assert broken_invariants(state) == ""


def test_counting_past_the_stop_is_detected() -> None:
    """C30: the invariants reject counters that take all that the verifier accepted where a stop cuts the text."""
    state = generation(32)
    state.advance(Verification(3, 4, (6, 7, 8, 9, 5)), Draft.chain((6, 7, 8, 9)))
    del state.output_token_ids[1:]
    assert broken_invariants(state) == "more accepted than committed"


def test_a_stop_at_the_last_token_of_the_block_cuts_nothing() -> None:
    """All tokens belong to the text, and it is over."""
    state = opened(generation())
    state.advance(Verification(4, 1, (6, 7)), Draft.chain((6,)), num_tokens_kept=2, stopped=True)
    assert (state.output_token_ids, state.finish_reason) == ([5, 6, 7], FinishReason.STOP)


def test_tokens_are_cut_by_a_stop_only() -> None:
    """Keeping fewer tokens without a stop would tear a gap into the text."""
    state = opened(generation())
    with pytest.raises(ValueError, match="only be cut off by a stop"):
        state.advance(Verification(4, 1, (6, 7)), Draft.chain((6,)), num_tokens_kept=1)


def test_max_tokens_ends_the_request_even_if_the_verifier_did_not_say_so() -> None:
    """C11: the count of the state decides; the reason is `length`."""
    state = opened(generation(3))
    state.advance(Verification(4, 1, (6, 7)), Draft.chain((6,)))
    assert (state.finish_reason, state.num_remaining) == (FinishReason.LENGTH, 0)


@pytest.mark.parametrize(
    ("verification", "reason"),
    [
        (Verification(3, 0, (6,)), "stale"),
        (Verification(5, 0, (6,)), "stale"),
        (Verification(4, 2, (6, 7, 8, 9)), "malformed"),
        (Verification(4, 0, ()), "malformed"),
        (Verification(4, 2, (6, 7)), "malformed"),
        (Verification(4, 3, (6, 7), FinishReason.STOP), "malformed"),
        (Verification(4, -1, (6,)), "malformed"),
        (Verification(4, 2, (6, 9, 5)), "malformed"),
        (Verification(4, 3, (6, 7, 8, 5)), "malformed"),
    ],
)
def test_what_does_not_fit_is_never_applied(verification: Verification, reason: str) -> None:
    """C06: late, doubled, reordered or impossible answers leave ids and counters as they were."""
    state = opened(generation())
    draft = Draft.chain((6, 7))
    assert state.reject_reason(verification, draft) == reason
    with pytest.raises(ValueError, match=reason):
        state.advance(verification, draft)
    assert (state.output_token_ids, state.num_rounds, state.num_draft_tokens) == ([5], 0, 0)


def test_more_than_may_be_emitted_is_malformed() -> None:
    """C11: an answer with more tokens than max_tokens leaves room for is refused, not cut in silence."""
    state = opened(generation(2))
    assert state.reject_reason(Verification(4, 1, (6, 7)), Draft.chain((6,))) == "malformed"


def test_nothing_is_applied_after_the_end() -> None:
    """An aborted request stays as it was, whatever arrives, and keeps its first reason."""
    state = opened(generation())
    state.end(FinishReason.ABORT)
    state.end(FinishReason.ERROR)
    assert state.reject_reason(Verification(4, 0, (6,)), Draft()) == "finished"
    assert state.finish_reason is FinishReason.ABORT


def test_end_inside_the_draft_commits_no_next_token() -> None:
    """C10: the accepted end token is the last one, and counts as accepted."""
    state = opened(generation())
    draft = Draft.chain((6, END, 7))
    state.advance(Verification(4, 2, (6, END), FinishReason.STOP), draft)
    assert (state.output_token_ids, state.finish_reason) == ([5, 6, END], FinishReason.STOP)
    assert state.num_accepted_tokens == 2


def test_drafters_are_counted_by_their_own_proposals() -> None:
    """Proposed: all its tokens; accepted: leading ones that the target emitted, won or not, the best chain once."""
    state = opened(generation())
    proposals = [
        Proposal((6, 7), drafter_id="a"),
        Proposal((6, 8, 9), drafter_id="b"),
        Proposal((6, 7, 5), drafter_id="b"),
        Proposal((9,), drafter_id="c"),
    ]
    state.advance(Verification(4, 2, (6, 7, 5)), Draft.chain((6, 7)), proposals, ("a", "b"))
    counts = {id_: (c.num_proposed_tokens, c.num_accepted_tokens, c.num_votes_won) for id_, c in state.drafters.items()}
    assert counts == {"a": (2, 2, 1), "b": (6, 3, 1), "c": (1, 0, 0)}


def test_a_moved_request_opens_where_it_stood() -> None:
    """Committed tokens count against max_tokens; the opening on another verifier adds one token and no round."""
    state = Generation(PROMPT, SamplingParams(max_tokens=4), [5, 6])
    assert (state.base_length, state.num_remaining) == (5, 2)
    state.open(Verification(5, 0, (7,), num_cached_tokens=3))
    assert (state.output_token_ids, state.num_rounds, state.num_cached_tokens) == ([5, 6, 7], 0, 3)
    assert not state.is_finished


def test_an_opening_may_end_the_request() -> None:
    """max_tokens 1, an end token first, or a stop string as the first token: over without a round."""
    assert opened(generation(1)).finish_reason is FinishReason.LENGTH
    ended, stopped = generation(), generation()
    ended.open(Verification(3, 0, (END,), FinishReason.STOP))
    stopped.open(Verification(3, 0, (6,)), 1, stopped=True)
    assert ended.finish_reason is stopped.finish_reason is FinishReason.STOP
    assert stopped.output_token_ids == [6]
