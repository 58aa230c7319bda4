"""Drafters that die, freeze, lie or talk garbage in the middle of an answer change its time, never its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.integration.faulty import STEP_DELAY, Rig, num_proposed
from tests.integration.processes import Process, at_least, equal_to, wait_metric
from tests.integration.whole_system import running
from tests.waiting import until

GOOD = {"suffix": "suffix", "lookup": "prompt_lookup"}
BAD = {"liar": "lie", "garbage": "garbage", "late": "delay:0.8"}
"""`late`: after the hard deadline of the vote."""

DRAIN_GRACE_S = 30.0

PeerT = TypeVar("PeerT")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("drafters")
    with running(
        folder / "logs",
        make_tiny_model(folder / "tiny"),
        drafters=GOOD | dict.fromkeys(BAD, "suffix"),
        proxied=[f"drafter-{name}" for name in GOOD],
        faults={"verifier-0": STEP_DELAY}
        | {f"drafter-{name}": f"drafter.propose={what}" for name, what in BAD.items()},
        # Who talks nonsense stays away for the whole test, as it must not come back by its wrong deeds alone.
        router_flags=("--vote-quorum", "1"),
        drafter_flags=("--drain-grace-s", str(DRAIN_GRACE_S)),
    ) as system:
        yield Rig(system)


@pytest.fixture(autouse=True)
def whole_again(rig: Rig) -> Iterator[None]:
    """Each test leaves a system that holds nothing and that has healed."""
    yield
    rig.system.assert_idle()
    rig.system.heal()
    rig.system.assert_idle()


@pytest.fixture(params=[("suffix",), tuple(GOOD)], ids=["one", "all"])
def victims(request: pytest.FixtureRequest) -> tuple[str, ...]:
    names: tuple[str, ...] = request.param
    return names


def drafters(rig: Rig, names: tuple[str, ...]) -> list[Process]:
    return [rig.system.drafters[name] for name in names]


def drafts_again(rig: Rig, names: tuple[str, ...]) -> bool:
    proposed = num_proposed(rig.ask_right(7, max_tokens=24, drafters=list(GOOD)))
    return all(proposed.get(name, 0) for name in names)


def for_all(hurt: Callable[[PeerT], None], peers: Sequence[PeerT]) -> Callable[[], None]:
    def hurt_all() -> None:
        for peer in peers:
            hurt(peer)

    return hurt_all


def test_killed_drafters_are_done_without(rig: Rig, victims: tuple[str, ...]) -> None:
    """A drafter, or all, killed in mid-stream: same text, no error; a new process at the address is used again."""
    rig.through(for_all(Process.kill, drafters(rig, victims)), drafters=list(GOOD))
    wait_metric(rig.system.router, "moot_peers", at_least(len(victims)), role="drafter", state="lost")
    rig.ask_right(drafters=list(GOOD))
    rig.system.heal()
    until(lambda: drafts_again(rig, victims), "restarted drafters propose")


def test_frozen_drafters_are_ejected_and_come_back(rig: Rig, victims: tuple[str, ...]) -> None:
    """A drafter, or all, frozen in mid-stream: at most three late votes, then it is not asked; thawed, it returns."""
    num_before = rig.system.router.log.count("drafter ejected")
    rig.through(for_all(Process.freeze, drafters(rig, victims)), drafters=list(GOOD))
    assert rig.system.router.log.count("drafter ejected") >= num_before + len(victims)
    rig.ask_right(drafters=list(GOOD))
    for process in drafters(rig, victims):
        process.thaw()
    until(lambda: drafts_again(rig, victims), "thawed drafters propose")


@pytest.mark.parametrize("direction", ["up", "down"])
def test_drafters_that_cannot_be_reached_are_done_without(rig: Rig, direction: str) -> None:
    """A network that swallows what is sent, in either direction, is a silent drafter; healed, it is used again."""
    proxies = [rig.system.proxies[f"drafter-{name}"] for name in GOOD]
    rig.through(for_all(lambda proxy: proxy.partition(direction), proxies), drafters=list(GOOD))
    rig.ask_right(drafters=list(GOOD))
    for proxy in proxies:
        proxy.heal()
    until(lambda: drafts_again(rig, tuple(GOOD)), "reachable drafters propose")


@pytest.mark.parametrize("names", [("garbage",), ("late",), (*BAD, *GOOD)])
def test_nonsense_and_lateness_cost_three_failures(rig: Rig, names: tuple[str, ...]) -> None:
    """Answers that cannot be used, or come too late, are dropped and counted; the third ejects for a while."""
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


@pytest.mark.parametrize("names", [("liar",), ("liar", *GOOD)])
def test_lies_are_never_believed(rig: Rig, names: tuple[str, ...]) -> None:
    """Wrong tokens with full confidence, alone or outvoted, streamed and not: the target's text comes out."""
    for index in range(2):
        reply = rig.ask_right(index, drafters=list(names), stream=bool(index % 2))
    assert num_proposed(reply)["liar"] > 0


def test_all_lost_is_said_and_ends(rig: Rig) -> None:
    """Without any drafter text is decoded plainly, a gauge says so, and says when it is over."""
    router, everybody = rig.system.router, tuple(rig.system.drafters)
    assert router.metric("moot_degraded", mode="no_drafters") == 0
    rig.through(for_all(Process.freeze, drafters(rig, everybody)))
    wait_metric(router, "moot_degraded", equal_to(1), mode="no_drafters")
    reply = rig.ask_right(5)
    assert reply.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    for process in drafters(rig, everybody):
        process.thaw()
    wait_metric(router, "moot_degraded", equal_to(0), mode="no_drafters")


def test_a_terminated_drafter_leaves_in_peace(rig: Rig) -> None:
    """SIGTERM in mid-stream: the requests go on without it, and it ends with status 0 as soon as they have left it."""
    process = rig.system.drafters["suffix"]
    rig.through(process.terminate, drafters=list(GOOD))
    assert process.wait(DRAIN_GRACE_S / 2) == 0, process.log
