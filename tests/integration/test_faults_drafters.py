"""Drafters that die, freeze, lie or talk garbage in the middle of an answer change its time, never its text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.integration.faulty import STEP_DELAY, Rig, system_rig
from tests.integration.processes import at_least, equal_to, wait_metric
from tests.waiting import until

GOOD = {"suffix": "suffix", "lookup": "prompt_lookup"}
BAD = {"liar": "lie", "second": "lie", "garbage": "garbage", "late": "delay:0.8"}
"""Both that lie propose the same wrong tokens. `late`: after the hard deadline of the vote."""

rig = system_rig(
    "drafters",
    drafters=GOOD | dict.fromkeys(BAD, "suffix"),
    proxied=[f"drafter-{name}" for name in GOOD],
    faults={"verifier-0": STEP_DELAY} | {f"drafter-{name}": f"drafter.propose={what}" for name, what in BAD.items()},
    # Who talks nonsense stays away for the whole test, as it must not come back by its wrong deeds alone.
    router_flags=("--vote-quorum", "1"),
)


def drafts_again(rig: Rig, names: tuple[str, ...]) -> bool:
    proposed = rig.ask_right(7, max_tokens=24, drafters=list(GOOD)).proposed
    return all(proposed.get(name, 0) for name in names)


def freeze_all(rig: Rig, names: Sequence[str]) -> None:
    for name in names:
        rig.system.drafters[name].freeze()


def thaw_all(rig: Rig, names: Sequence[str]) -> None:
    for name in names:
        rig.system.drafters[name].thaw()


def test_a_killed_drafter_is_done_without(rig: Rig) -> None:
    """C34: a drafter killed in mid-stream: same text, no error; a new process at the address is used again."""
    rig.through(rig.system.drafters["suffix"].kill, drafters=list(GOOD))
    wait_metric(rig.system.router, "moot_peers", at_least(1), role="drafter", state="lost")
    rig.ask_right(drafters=list(GOOD))
    rig.system.heal()
    until(lambda: drafts_again(rig, ("suffix",)), "the restarted drafter proposes")


def test_frozen_drafters_are_ejected_and_come_back(rig: Rig) -> None:
    """All frozen in mid-stream: at most three late votes, then they are not asked; thawed, they return."""
    num_before = rig.system.router.log.count("drafter ejected")
    rig.through(lambda: freeze_all(rig, tuple(GOOD)), drafters=list(GOOD))
    assert rig.system.router.log.count("drafter ejected") >= num_before + len(GOOD)
    rig.ask_right(drafters=list(GOOD))
    thaw_all(rig, tuple(GOOD))
    until(lambda: drafts_again(rig, tuple(GOOD)), "thawed drafters propose")


def test_drafters_that_cannot_be_reached_are_done_without(rig: Rig) -> None:
    """A network that swallows what is sent, the questions or the answers, is a silent drafter; healed, it is used
    again."""
    up, down = (rig.system.proxies[f"drafter-{name}"] for name in GOOD)
    rig.through(lambda: (up.partition("up"), down.partition("down")), drafters=list(GOOD))
    rig.ask_right(drafters=list(GOOD))
    up.heal()
    down.heal()
    until(lambda: drafts_again(rig, tuple(GOOD)), "reachable drafters propose")


@pytest.mark.parametrize("names", [("garbage",), (*BAD, *GOOD)])
def test_nonsense_and_lateness_cost_three_failures(rig: Rig, names: tuple[str, ...]) -> None:
    """C20, C34: answers that cannot be used or come too late are dropped and counted; the third ejects for a while."""
    router, bad = rig.system.router, [name for name in names if name in ("garbage", "late")]
    before = {name: router.metric("moot_proposals_dropped_total", drafter=name) for name in bad}
    num_before = router.log.count("drafter ejected")
    rig.ask_right(1, drafters=list(names))
    rig.ask_right(2, drafters=list(names))
    assert router.log.count("drafter ejected") >= num_before + len(bad)
    for name in bad:
        # Of late answers only those are counted that came after all.
        count = 3 if name == "garbage" else 1
        wait_metric(router, "moot_proposals_dropped_total", at_least(before[name] + count), drafter=name)
    # The ejection ends by itself.
    wait_metric(router, "moot_peers", equal_to(0), role="drafter", state="ejected")


@pytest.mark.parametrize("names", [("liar",), ("liar", "second"), ("liar", "second", *GOOD)])
def test_lies_are_never_believed(rig: Rig, names: tuple[str, ...]) -> None:
    """C33: wrong tokens with full confidence, alone, unanimous or outvoted, streamed and not: the target's text comes
    out."""
    for index in range(2):
        reply = rig.ask_right(index, drafters=list(names), stream=bool(index % 2))
    assert reply.proposed["liar"] > 0


def test_all_lost_is_said_and_ends(rig: Rig) -> None:
    """Without any drafter text is decoded plainly, a gauge says so, and says when it is over."""
    router, everybody = rig.system.router, tuple(rig.system.drafters)
    assert router.metric("moot_degraded", mode="no_drafters") == 0
    rig.through(lambda: freeze_all(rig, everybody))
    wait_metric(router, "moot_degraded", equal_to(1), mode="no_drafters")
    reply = rig.ask_right(5)
    assert reply.drafting["num_draft_tokens"] == 0
    thaw_all(rig, everybody)
    wait_metric(router, "moot_degraded", equal_to(0), mode="no_drafters")
