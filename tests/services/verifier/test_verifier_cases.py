"""Kinds of mistakes that systems of this sort have made in the life of a session, one test per kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moot.core.errors import InvalidRequest, NoCapacity, UnknownSession
from moot.core.types import ROOT, Draft, FinishReason, SamplingParams
from services.verifier.commands import Abort, Command, Failed, Finish, Open, Opened, Verified, Verify
from services.verifier.engine import Engine
from services.verifier.sessions import PendingWork
from tests.services.verifier.local_sessions import Talk, talk, verified
from tests.services.verifier.verifier_driver import MakeEngine, Result, play, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=300)
PROMPT = tuple(index % 250 for index in range(500))
END = 258


def one(engine: Engine, *args: object, **options: object) -> Result:
    (result,) = run(engine, [play(*args, **options)])  # type: ignore[arg-type]
    return result


def test_a_late_or_doubled_command_changes_nothing(make_engine: MakeEngine) -> None:
    """C06: a verify sent twice is answered once and counted; one for a session that is gone gets UNKNOWN_SESSION."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    opening, verify = Open(1, "r", (5,), GREEDY), Verify(1, 1, 2, Draft.chain(text[1:3]))
    *answers, last = talk(
        engine, opening, verify, verify, opening, Verify(1, 2, 5, Draft()), Abort(1), Verify(1, 3, 6, Draft())
    )
    assert [one.output_token_ids for one in verified(answers)] == [text[:1], text[1:4], text[4:5]]
    assert last == Failed(1, UnknownSession, "no such session: open it again", 3)
    dropped = engine.metrics.answers_dropped
    assert dropped.labels(role="router", reason="stale_round")._value.get() == 1
    assert dropped.labels(role="router", reason="doubled_open")._value.get() == 1


@pytest.mark.parametrize(
    "frames",
    [
        [[Open(1, "a", (5,), GREEDY)], [Verify(1, 1, 3, Draft())]],
        [[Open(1, "a", (5,), GREEDY), Verify(1, 1, 1, Draft())]],
    ],
    ids=("another base length", "before the answer"),
)
def test_sides_that_disagree_about_a_session_end_it_and_no_other(
    make_engine: MakeEngine, frames: list[list[Command]]
) -> None:
    """C06: another base length, or a verify before the last answer, which cannot know it: INVALID; the other session is
    untouched."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    with Talk(engine) as stream:
        stream.ask(Open(2, "b", (5,), GREEDY))
        for frame in frames:
            answers = stream.ask(*frame)
        assert [(one.session_id, one.error) for one in answers if isinstance(one, Failed)] == [(1, InvalidRequest)]
        assert len(answers) == 1
        (other,) = verified(stream.ask(Verify(2, 1, 2, Draft.chain(text[1:4]))))
        assert other.num_accepted == 3


@pytest.mark.parametrize(
    "bad",
    [
        *({"draft": Draft.chain(ids)} for ids in ((259,), (3, 299), (2**32 - 1,), (1,) * 65)),
        *({"draft": Draft((1, 2), parents)} for parents in ((-1, 1), (-1, 5), (-2, 0), (-1,))),
        {"draft": Draft((1, 1), (-1, -1))},
        *({"prompt": ids} for ids in ((), (259,), (5, 2**31))),
        *({"temperature": value} for value in (-1.0, math.nan, math.inf)),
        *({"top_p": value} for value in (2.0, math.nan)),
        {"min_p": -0.5},
        *({"repetition_penalty": value} for value in (0.0, math.nan)),
        {"presence_penalty": math.inf},
        {"logit_bias": {3: math.nan}},
        {"max_tokens": 0},
        {"logprobs": 10**9},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_what_cannot_be_is_refused_and_harms_nobody(make_engine: MakeEngine, bad: dict[str, object]) -> None:
    """C07, C19, C23: drafts with ids in the model's padding (259 to 299) or outside, with parents that make no tree,
    twins, too many; prompts without ids or with foreign ones; parameters that no sampler can work with, which the
    router refuses first: INVALID, and the next request is served."""
    changes = {name: value for name, value in bad.items() if name not in ("draft", "prompt")}
    with Talk(make_engine()) as stream:
        answers = stream.ask(Open(1, "r", bad.get("prompt", (5,)), replace(GREEDY, **changes)))  # type: ignore[arg-type]
        if "draft" in bad:
            verified(answers)
            answers = stream.ask(Verify(1, 1, 2, bad["draft"]))  # type: ignore[arg-type]
        assert [(answer.session_id, answer.error) for answer in answers] == [(1, InvalidRequest)]  # type: ignore[union-attr]
        (good,) = verified(stream.ask(Open(2, "s", (5,), GREEDY)))
        assert good.output_token_ids


@pytest.mark.parametrize("changes", [{"top_k": 9_999_999}, {"top_p": 0.0}, {"logit_bias": {10**7: 5.0}}])
def test_extreme_parameters_have_a_meaning(make_engine: MakeEngine, changes: dict[str, object]) -> None:
    """C19: above the vocabulary: no limit; top_p 0: one token; a bias on no id: nothing."""
    result = one(make_engine(), [5], replace(GREEDY, temperature=1.0, **changes))  # type: ignore[arg-type]
    assert len(result.output_token_ids) == 12


def test_the_context_limit_ends_the_text(make_engine: MakeEngine) -> None:
    """C11: prompt + output never exceed the context, whatever the draft's length; the same text as without drafts."""
    engine = make_engine(max_model_len=20)
    plain = one(engine, list(range(9)), LONG)
    assert len(plain.output_token_ids) == 11
    assert plain.finish_reason is FinishReason.LENGTH
    text = (*plain.output_token_ids, *range(20))
    drafted = one(engine, list(range(9)), LONG, lambda output: Draft.chain(text[len(output) : len(output) + 8]))
    assert drafted.output_token_ids == plain.output_token_ids
    refused = one(engine, list(range(21)), LONG).failure
    assert refused is not None
    assert refused.error is InvalidRequest
    assert "21 tokens" in refused.message
    full = one(engine, list(range(20)), LONG)
    assert (full.output_token_ids, full.finish_reason) == ((), FinishReason.LENGTH)


def test_nodes_that_cannot_matter_take_no_row() -> None:
    """C11: of a tree only the nodes after which a token may still come are fed: depth below max_new - 1."""
    draft = Draft((1, 2, 3, 4, 5), (-1, 0, -1, 1, 2))
    works = [PendingWork.verification(draft, max_new, 0, 0) for max_new in (1, 2, 3, 4)]
    assert [work.fed_nodes for work in works] == [(), (0, 2), (0, 1, 2, 4), (0, 1, 2, 3, 4)]
    assert [work.num_fed_levels for work in works] == [0, 1, 2, 3]


def test_a_request_that_is_over_opens_with_its_end(make_engine: MakeEngine) -> None:
    """Opened anew with all its tokens, a request is answered with its end reason and nothing more."""
    engine = make_engine()
    over = one(engine, [5], GREEDY, committed=range(12))
    assert (over.output_token_ids, over.finish_reason) == (tuple(range(12)), FinishReason.LENGTH)
    stopped = one(engine, [5], replace(GREEDY, ignore_eos=False), committed=(1, END))
    assert (stopped.output_token_ids, stopped.finish_reason) == ((1, END), FinishReason.STOP)


def test_the_end_of_a_stream_frees_everything(make_engine: MakeEngine) -> None:
    """C24: sessions in every state (waiting, in prefill, idle, with a draft) are gone after one step."""
    engine = make_engine(max_num_seqs=3, prefill_chunk_tokens=8)
    with Talk(engine) as talk:
        talk.send(*(Open(number, "r", (7,) * (2 + number * 10), GREEDY) for number in range(1, 6)))
        for _ in range(4):
            engine.step()
        assert engine.runner.pool.used_tokens > 0
        assert engine.serving.scheduler.num_waiting > 0
    assert engine.stats.num_sessions == 0
    assert engine.runner.pool.used_tokens == 0
    assert not talk.stream.sessions


def test_finish_and_abort_free_the_session(make_engine: MakeEngine) -> None:
    """C24: both are silent, and neither is an error for a session that has ended by itself."""
    with Talk(engine := make_engine()) as stream:
        for end in (Finish, Abort):
            verified(stream.ask(Open(1, "r", (5,), GREEDY)))
            assert stream.ask(end(1)) == stream.ask(end(1)) == []
            assert engine.stats.num_sessions == 0


def test_an_idle_session_is_freed_when_its_lease_is_over(make_engine: MakeEngine) -> None:
    """A peer that forgets a session loses it, and is told."""
    engine = make_engine(session_idle_limit_s=0.001)
    with Talk(engine) as stream:
        stream.send(Open(1, "r", (5,), GREEDY))
        for _ in range(10_000):
            engine.step()
            if len(stream.answers) == 2:
                break
        told = stream.answers[1]
        assert isinstance(told, Failed)
        assert told.error is UnknownSession
        assert engine.runner.pool.used_tokens == 0


def test_overload_is_refused_at_once(make_engine: MakeEngine) -> None:
    """Past the bounds on sessions or waiting tokens an opening is refused by `submit` itself, before any step."""
    with Talk(make_engine(max_num_seqs=1, max_waiting_seqs=2, max_waiting_tokens=1000)) as stream:
        stream.send(Open(1, "r", (5,) * 900, GREEDY), Open(2, "r", (5,) * 200, GREEDY))
        assert [(answer.session_id, answer.error) for answer in stream.answers] == [(2, NoCapacity)]  # type: ignore[union-attr]
        stream.send(*(Open(number, "r", (5,), GREEDY) for number in (3, 4, 5)))
        assert [answer.session_id for answer in stream.answers] == [2, 5]
        # The first is answered and idle; its tokens wait no more.
        assert any(isinstance(answer, Opened) for answer in stream.ask())
        stream.ask(Finish(1))
        stream.send(Open(6, "r", (5,) * 990, GREEDY))
        assert stream.answers[-1].session_id != 6


def test_a_page_left_over_from_a_rejected_draft_is_not_promised_to_another_session(make_engine: MakeEngine) -> None:
    """What the scheduler counts is what the caches hold, so that no session dies for want of a page: a rejected draft
    across a page border leaves a page with its session, and a newcomer waits for a free one."""
    engine = make_engine(pages=3, max_model_len=1200)
    with Talk(engine) as stream:
        (opened,) = verified(stream.ask(Open(1, "held", PROMPT, LONG)))
        wrong = Draft.chain(((opened.output_token_ids[0] + 1) % 250,) * 20)
        verified(stream.ask(Verify(1, 1, 501, wrong), Open(2, "fits", PROMPT[:100], LONG)))
        assert engine.runner.pool.used_tokens == 3 * 512
        assert engine.serving.scheduler.num_used_pages == 3
        assert stream.ask(Open(3, "waits", PROMPT[:200], LONG)) == []
        assert [answer.session_id for answer in stream.ask(Finish(1))] == [3]
        assert [type(answer) for answer in stream.answers] == [Opened, Verified, Opened, Opened]


def test_siblings_take_one_slot_a_level(make_engine: MakeEngine) -> None:
    """A bushy tree at a page border needs room for its depth, not for its nodes: nobody is preempted for it."""
    engine = make_engine(pages=2)
    with Talk(engine) as stream:
        stream.ask(Open(1, "bushy", PROMPT, LONG), Open(2, "other", PROMPT[:100], LONG))
        verified(stream.ask(Verify(1, 1, 501, Draft(tuple(range(60)), (ROOT,) * 60))))
        assert engine.serving.scheduler.num_admitted == 2


def test_top_candidates_are_the_likeliest_ids_per_committed_token(make_engine: MakeEngine) -> None:
    """As many rows as output tokens, greedy tokens first in theirs."""
    engine = make_engine()
    text = one(engine, [5], GREEDY).output_token_ids
    draft = Draft.chain((*text[1:3], 255))
    answers = talk(engine, Open(1, "r", (5,), GREEDY, num_top_candidates=4), Verify(1, 1, 2, draft))
    rows = [row for one in verified(answers) for row in one.top_candidates]
    assert [row[0] for row in rows] == list(text[:4])
    assert all(len(set(row)) == 4 for row in rows)


def test_hints_of_a_request_are_its_own_whoever_shares_the_step(make_engine: MakeEngine) -> None:
    """Requests that want different numbers of hints, or none, or draw with noise, get what each gets alone."""
    engine = make_engine()
    noisy = SamplingParams(temperature=0.9, seed=3)
    asked = [
        Open(number, "r", (number,), params, num_top_candidates=width)
        for number, params, width in ((5, GREEDY, 4), (6, noisy, 2), (7, GREEDY, 0), (8, noisy, 7))
    ]

    def hints(openings: Sequence[Open]) -> list[tuple[tuple[int, ...], ...]]:
        with Talk(engine) as stream:
            answers = sorted(stream.ask(*openings), key=lambda answer: answer.session_id)
            return [one.top_candidates for one in verified(answers)]

    alone = [rows for opening in asked for rows in hints([opening])]
    assert [len(rows[0]) if rows else 0 for rows in alone] == [4, 2, 0, 7]
    assert hints(asked) == alone
