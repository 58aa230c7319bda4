"""Drafters that are few, dead, late, lying, talking garbage or short of context: the text stays, and it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.api import assert_refused, choice_of, post
from tests.integration.looping_model import greedy_ids
from tests.integration.shared_systems import HOSTILE_DRAFTERS
from tests.integration.whole_system import System
from tests.waiting import until

HA = list(b" ha ha ha")
EIGHT = {"num_speculative_tokens": 8}
OFF = {"num_speculative_tokens": 0}
GREEDY = {"temperature": 0}

CORRECT = {"prompt": HA, "max_tokens": 40, "temperature": 0}


def ask(system: System, drafters: list[str], **changes: Any) -> dict[str, Any]:
    """The greedy text of the cycle with these drafters, found to be the true one."""
    one = choice_of(system.router, CORRECT | EIGHT | {"drafters": drafters} | changes)
    assert one["token_ids"] == greedy_ids(HA, len(one["token_ids"]))
    assert one["usage"]["completion_tokens"] == changes.get("max_tokens", 40)
    return one


def dropped(system: System, drafter: str, reason: str | None = None) -> float:
    labels = {"drafter": drafter} | ({"reason": reason} if reason else {})
    return system.router.metric("moot_proposals_dropped_total", **labels)


def all_return(system: System) -> None:
    """Ejected drafters have come back by themselves."""
    until(lambda: system.router.metric("moot_peers", role="drafter", state="ready") == 6, "all are back")


def test_garbage_is_dropped_counted_and_ejected(hostile: System) -> None:
    """C20: ids outside the vocabulary, too many, none, wrong confidences: dropped and counted, ejected after three
    failures, back after a while, and the text is right all along."""
    before = dropped(hostile, "garbage")
    first = ask(hostile, ["garbage", "good"])
    assert first["metrics"]["num_accepted_tokens"] > 20
    assert "garbage" not in first["metrics"]["drafters"]
    until(lambda: hostile.router.log.count('"drafter ejected"') > 0, "it was ejected")
    assert '"drafter": "garbage"' in hostile.router.log
    assert dropped(hostile, "garbage") - before >= 3
    all_return(hostile)
    alone = ask(hostile, ["garbage"])
    assert alone["metrics"]["num_draft_tokens"] == alone["metrics"]["num_accepted_tokens"] == 0
    all_return(hostile)


def test_a_unanimous_vote_for_a_wrong_token_is_no_token(hostile: System) -> None:
    """C33: all drafters agree on wrong tokens; the vote is unanimous and the target's tokens come out."""
    count, total = (hostile.router.metric(f"moot_vote_agreement_ratio_{part}") for part in ("count", "sum"))
    one = ask(hostile, ["liar", "second_liar", "third_liar"])
    metrics = one["metrics"]
    assert metrics["num_draft_tokens"] >= 8 * 30
    assert metrics["num_accepted_tokens"] <= 2  # a random id is right once in 259
    votes = hostile.router.metric("moot_vote_agreement_ratio_count") - count
    # All rounds but the last, in which one token was left to make and so none to draft.
    assert votes == metrics["num_drafts"] - 1
    assert hostile.router.metric("moot_vote_agreement_ratio_sum") - total == pytest.approx(votes)
    sampled = CORRECT | {"temperature": 1.1, "seed": 3, "drafters": ["liar", "second_liar", "third_liar"]}
    ids = [choice_of(hostile.router, sampled | length)["token_ids"] for length in (OFF, EIGHT)]
    assert ids[0] == ids[1]


def test_drafters_with_nothing_valid_are_no_agreement(hostile: System) -> None:
    """C33: empty and invalid proposals count as no vote, not as a unanimous one."""
    all_return(hostile)
    count = hostile.router.metric("moot_vote_agreement_ratio_count")
    ask(hostile, ["garbage"])
    assert hostile.router.metric("moot_vote_agreement_ratio_count") == count
    all_return(hostile)


@pytest.mark.parametrize(
    "drafters", [["good"], ["good", "liar"], ["liar", "good", "second_liar"], ["good", "garbage", "liar"], []]
)
def test_any_number_of_drafters_gives_the_text(hostile: System, drafters: list[str]) -> None:
    """C34: one drafter; two that tie; three of which two are wrong, or one is dissenting; none at all."""
    one = ask(hostile, drafters)
    metrics = one["metrics"]
    assert (metrics["num_draft_tokens"] > 0) == bool(drafters)
    # On a tree the branch of the one that is right is verified as well, whoever leads the vote.
    assert (metrics["num_accepted_tokens"] > 0) == ("good" in drafters)
    assert set(metrics["drafters"]) <= set(drafters)


def test_a_late_drafter_costs_its_deadline_and_is_ejected(hostile: System) -> None:
    """C34: one drafter never answers in time: rounds go on without it, it is counted, and ejected at its third miss."""
    all_return(hostile)
    log = hostile.router.log.count('"drafter": "late"')
    one = ask(hostile, ["good", "late"], max_tokens=60)
    assert one["metrics"]["num_accepted_tokens"] > 20
    assert "late" not in one["metrics"]["drafters"]
    until(lambda: hostile.router.log.count('"drafter": "late"') > log, "it was ejected")
    all_return(hostile)


def test_dead_drafters_one_and_all(hostile: System) -> None:
    """C34: one dead, all dead, all back: the same text each time, a gauge says so, and drafting returns by itself."""
    router = hostile.router
    try:
        hostile.drafters["good"].kill()
        until(lambda: router.metric("moot_peers", role="drafter", state="ready") < 6, "the loss is noticed")
        assert ask(hostile, ["good", "liar"])["metrics"]["num_accepted_tokens"] <= 2
        for drafter in hostile.drafters.values():
            drafter.kill()
        until(lambda: router.metric("moot_peers", role="drafter", state="ready") == 0, "all losses are noticed")
        one = ask(hostile, list(HOSTILE_DRAFTERS))
        assert one["metrics"]["num_draft_tokens"] == 0
        assert router.metric("moot_degraded", mode="no_drafters") == 1
    finally:
        hostile.heal()
    assert router.metric("moot_degraded", mode="no_drafters") == 0
    assert ask(hostile, ["good"])["metrics"]["num_accepted_tokens"] > 20


def test_a_drafter_past_its_context_abstains(short_sighted: System) -> None:
    """C21: drafter suffix knows 64 tokens, the target 2048; a prompt of 56 tokens and 50 more: it takes part up to its
    limit, the other one throughout, and the text is that of plain decoding."""
    router = short_sighted.router
    body = {
        "prompt": list(b"abc" * 18 + b"ab"),
        "max_tokens": 50,
        "logit_bias": {"97": 30, "98": 30, "99": 30},
        **GREEDY,
    }
    plain = choice_of(router, body | OFF)
    drafted = choice_of(router, body | EIGHT)
    assert drafted["token_ids"] == plain["token_ids"]
    assert len(plain["token_ids"]) == 50
    by_drafter = drafted["metrics"]["drafters"]
    assert 0 < by_drafter["suffix"]["num_proposed_tokens"] <= 8 * 8
    assert by_drafter["prompt_lookup"]["num_proposed_tokens"] > by_drafter["suffix"]["num_proposed_tokens"]
    assert drafted["metrics"]["num_accepted_tokens"] > 0
    alone = choice_of(router, body | EIGHT | {"drafters": ["suffix"]})
    assert alone["token_ids"] == plain["token_ids"]
    longer = choice_of(router, body | {"prompt": [97] * 100, "drafters": ["suffix"], **EIGHT})
    assert longer["metrics"]["num_draft_tokens"] == 0
    assert dropped(short_sighted, "suffix") == 0
    assert router.metric("moot_peers", role="drafter", state="ready") == 1


def test_an_unknown_drafter_is_refused_by_name(hostile: System) -> None:
    """C34: a request for a drafter that there is not is 400 and says which there are."""
    error = assert_refused(post(hostile.router, CORRECT | {"drafters": ["good", "nobody"]}), "drafters")
    assert all(name in error["message"] for name in HOSTILE_DRAFTERS)
