"""KV pages: what the scheduler counts is what the caches hold, so that no session dies for want of a page."""

from __future__ import annotations

from moot.core.types import ROOT, Draft, SamplingParams
from services.verifier.commands import Answer, Finish, Open, Opened, Verified, Verify
from tests.services.verifier.verifier_driver import MakeEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


def test_a_page_left_over_from_a_rejected_draft_is_not_promised_to_another_session(make_engine: MakeEngine) -> None:
    """A rejected draft across a page border leaves a page with its session: a newcomer waits for a free one."""
    engine = make_engine(pages=3, max_model_len=1200)
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    prompt = tuple(index % 250 for index in range(500))
    engine.submit(stream, [Open(1, "held", prompt, GREEDY)])
    while engine.step():
        pass
    (opened,) = answers
    assert isinstance(opened, Opened)
    wrong = (opened.verification.output_token_ids[0] + 1) % 250
    engine.submit(stream, [Verify(1, 1, 501, Draft.chain((wrong,) * 20)), Open(2, "fits", prompt[:100], GREEDY)])
    while engine.step():
        pass
    assert engine.runner.pool.used_tokens == 3 * 512
    assert engine.serving.scheduler.num_used_pages == 3
    engine.submit(stream, [Open(3, "waits", prompt[:200], GREEDY)])
    while engine.step():
        pass
    assert [type(answer) for answer in answers] == [Opened, Verified, Opened]
    engine.submit(stream, [Finish(1)])
    while engine.step():
        pass
    assert isinstance(answers[-1], Opened)
    assert answers[-1].session_id == 3
    engine.disconnect(stream)


def test_siblings_take_one_slot_a_level(make_engine: MakeEngine) -> None:
    """A bushy tree at a page border needs room for its depth, not for its nodes: nobody is preempted for it."""
    engine = make_engine(pages=2)
    answers: list[Answer] = []
    stream = engine.connect(answers.extend)
    prompt = tuple(index % 250 for index in range(500))
    engine.submit(stream, [Open(1, "bushy", prompt, GREEDY), Open(2, "other", prompt[:100], GREEDY)])
    while engine.step():
        pass
    engine.submit(stream, [Verify(1, 1, 501, Draft(tuple(range(60)), (ROOT,) * 60))])
    while engine.step():
        pass
    assert isinstance(answers[-1], Verified)
    assert engine.serving.scheduler.num_admitted == 2
    engine.disconnect(stream)
