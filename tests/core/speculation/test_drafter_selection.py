"""Whom rounds ask: the panel by itself."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from moot.core.errors import ConfigError
from moot.core.speculation.drafter_selection import (
    REASONS,
    SILENT,
    SLOW,
    USELESS,
    WINDOW,
    DrafterAnswer,
    DrafterSelection,
    SelectionRound,
)
from moot.core.speculation.policy import SpeculationOptions, make_policy

STEP_S = 0.03
Says = Mapping[str, tuple[int, float | None]]
"""(tokens right, seconds until the answer) per drafter."""


def a_round(answers: Says) -> SelectionRound:
    """Of the drafters that were asked; the best one's tokens were accepted."""
    heard = {drafter_id: DrafterAnswer(right, seconds) for drafter_id, (right, seconds) in answers.items()}
    draft_s = max((0.05 if one.seconds is None else one.seconds for one in heard.values()), default=0.0)
    accepted = max((one.num_right for one in heard.values()), default=0)
    return SelectionRound(heard, accepted, accepted + 1, draft_s, draft_s + STEP_S)


def window(**others: tuple[int, float | None]) -> DrafterSelection:
    """A selection that has seen a good drafter beside these for one window."""
    selection = DrafterSelection()
    play(selection, {**GOOD, **others}, WINDOW)
    return selection


def play(selection: DrafterSelection, says: Says, rounds: int) -> dict[str, int]:
    """How often each was asked in so many rounds in which every drafter says the same all along."""
    asked = dict.fromkeys(says, 0)
    for _ in range(rounds):
        chosen = selection.choose(list(says))
        for drafter_id in chosen:
            asked[drafter_id] += 1
        selection.learn(a_round({drafter_id: says[drafter_id] for drafter_id in chosen}))
    return asked


GOOD: Says = {"good": (3, 0.004)}


@pytest.mark.parametrize(
    ("other", "reason"),
    [((0, 0.004), USELESS), ((3, 0.004), USELESS), ((4, 0.045), SLOW), ((0, None), SILENT), ((0, 0.0), USELESS)],
)
def test_one_that_does_not_pay_is_left_out(other: tuple[int, float | None], reason: str) -> None:
    """After one window a drafter is left out, with its reason, which brings nothing that another does not, brings less
    than the wait for it costs, or never answers; then it is asked in few rounds."""
    selection, says = window(other=other), {**GOOD, "other": other}
    (absent,) = selection.left_out.items()
    # Of two that say the same one stays, whichever.
    assert absent[1] == reason
    assert reason in REASONS
    if other != GOOD["good"]:
        assert absent[0] == "other"
    asked = play(selection, says, 2000)
    assert 0 < asked[absent[0]] < 60
    assert sum(asked.values()) == 2000 + asked[absent[0]]


@pytest.mark.parametrize("wait_s", [None, 0.05, 0.02])
def test_trying_costs_next_to_nothing(wait_s: float | None) -> None:
    """Whatever one that is left out costs, trying it takes no more than a hundredth of the time."""
    says = {**GOOD, "other": (0, wait_s), "another": (0, wait_s)}
    selection = window(other=(0, wait_s), another=(0, wait_s))
    assert set(selection.left_out) == {"other", "another"}
    seconds = without = 0.0
    for _ in range(3000):
        done = a_round({drafter_id: says[drafter_id] for drafter_id in selection.choose(list(says))})
        selection.learn(done)
        seconds += done.seconds
        without += a_round(GOOD).seconds
    assert seconds < 1.01 * without


def test_two_that_are_equally_slow_leave_together() -> None:
    """Neither is waited for alone, yet both together are; those that are equally slow and pay for it stay."""
    assert dict(window(slow=(0, 0.04), slower=(0, 0.041)).left_out) == {"slow": USELESS, "slower": USELESS}
    worth = DrafterSelection()
    play(worth, {"weak": (0, 0.001), "slow": (4, 0.01), "slower": (5, 0.011)}, WINDOW)
    assert "slower" not in worth.left_out


def test_what_stops_rounds_is_not_waited_with() -> None:
    """A silent drafter is left out after an eighth of a window, and nobody along with it who has merely been unlucky in
    so few rounds; nor is one left out for good whose twin is left out later."""
    selection = DrafterSelection()
    says = {**GOOD, "silent": (0, None), "unlucky": (0, 0.004)}
    play(selection, says, WINDOW // 8)
    assert dict(selection.left_out) == {"silent": SILENT}
    twins = window(twin=GOOD["good"])
    ((absent, _),) = twins.left_out.items()
    (present,) = {"good", "twin"} - {absent}
    play(twins, {absent: (3, 0.004), present: (0, 0.004), "weak": (1, 0.004)}, 3 * WINDOW)
    assert present in twins.left_out
    assert absent not in twins.left_out


def test_one_that_turns_slow_is_left_out_at_once() -> None:
    """Whoever begins to stop rounds in the midst of a window is not waited for until its end; one pause of a machine,
    in a round of anybody's, is not taken for that."""
    selection = DrafterSelection()
    bringing: Says = {"weak": (1, 0.0), "other": (4, 0.001)}
    play(selection, bringing, WINDOW // 2 + 1)
    assert not selection.left_out
    play(selection, {**bringing, "other": (4, 0.2)}, WINDOW // 4)
    assert set(selection.left_out) == {"other"}
    pausing = DrafterSelection()
    play(pausing, bringing, WINDOW // 2 + 1)
    play(pausing, {**bringing, "other": (4, 0.2)}, 1)
    play(pausing, bringing, WINDOW // 4)
    assert not pausing.left_out


def test_draft_times_count_once_it_is_known_who_is_waited_for() -> None:
    """Before a part of the first window is over, and whenever the panel changes, what drafting took is not held against
    drafting; where there is one drafter there is nobody to choose, and it counts at once."""
    selection = DrafterSelection()
    says = {**GOOD, "other": (5, 0.02)}
    void = [selection.learn(a_round(says)) for _ in range(WINDOW - 1)]
    num_void = void.index(False)
    assert 8 <= num_void <= WINDOW // 2
    assert not any(void[num_void:])
    assert not DrafterSelection().learn(a_round(GOOD))


def test_one_that_becomes_good_comes_back() -> None:
    """A drafter that is left out and then brings something is asked in every round again soon, and stays."""
    selection = window(other=(0, 0.01))
    assert set(selection.left_out) == {"other"}
    play(selection, {**GOOD, "other": (6, 0.01)}, 200)
    assert "other" not in selection.left_out
    asked = play(selection, {**GOOD, "other": (6, 0.01)}, 300)
    assert asked["other"] == 300


def test_one_that_turns_again_and_again_is_believed_less_each_time() -> None:
    """A drafter that is good until it is back and bad from then on cannot make its rounds the rule."""
    selection = DrafterSelection()
    bad = 0
    for _ in range(6000):
        chosen = selection.choose(["good", "other"])
        is_back = "other" not in selection.left_out
        answers = {**GOOD, "other": (0, None) if is_back else (6, 0.004)}
        selection.learn(a_round({drafter_id: answers[drafter_id] for drafter_id in chosen}))
        bad += is_back
    assert bad < 0.15 * 6000


def test_the_last_one_is_asked_however_bad() -> None:
    """Whether drafting pays at all is the length policy's to say; a request whose drafters are all left out asks all
    of them; one that is exempt is asked in every round and does not keep others from being left out."""
    selection = DrafterSelection()
    play(selection, {"only": (0, None)}, 3 * WINDOW)
    assert not selection.left_out
    play(selection, {**GOOD, "other": (0, 0.02)}, WINDOW)
    assert selection.choose(["other"]) == ["other"]
    fixed = DrafterSelection()
    fixed.exempt.add("inside")
    play(fixed, {"inside": (2, 0.0), "other": (0, 0.02)}, WINDOW)
    assert dict(fixed.left_out) == {"other": USELESS}
    assert play(fixed, {"inside": (0, 0.0), "other": (0, 0.02)}, 100)["inside"] == 100


def test_a_request_that_names_its_drafters_asks_them() -> None:
    """As K is fixed by a request, so is whom it asks; `all` asks everybody in every request."""
    pool = make_policy()
    play(pool.selection, {**GOOD, "other": (0, 0.02)}, WINDOW)
    assert list(pool.open(["good", "other"]).choose(["good", "other"])) == ["good"]
    assert list(pool.open(["good", "other"], is_chosen=True).choose(["good", "other"])) == ["good", "other"]
    everybody = make_policy(SpeculationOptions(asks="all"))
    play(everybody.selection, {**GOOD, "other": (0, 0.02)}, WINDOW)
    assert list(everybody.open(["good", "other"]).choose(["good", "other"])) == ["good", "other"]
    with pytest.raises(ConfigError, match="asks"):
        make_policy(SpeculationOptions(asks="nobody"))


def test_a_drafter_that_is_forgotten_starts_anew() -> None:
    """Another model behind an old name is not left out for what the old one did."""
    pool = make_policy()
    play(pool.selection, {**GOOD, "other": (0, 0.02)}, WINDOW)
    assert set(pool.selection.left_out) == {"other"}
    pool.forget("other")
    assert not pool.selection.left_out
    assert list(pool.open(["good", "other"]).choose(["good", "other"])) == ["good", "other"]
