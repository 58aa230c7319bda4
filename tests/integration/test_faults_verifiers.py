"""Verifiers that die, freeze, stall or cannot be reached: the request moves, with no gap and no token twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from moot.runtime.faults import EXIT_STATUS
from tests.integration.asking import Ask
from tests.integration.faulty import STEP_DELAY, Rig, body, chat_body, system_rig
from tests.integration.processes import Process, at_least, equal_to, wait_metric
from tests.integration.whole_system import HEARTBEAT_S, WATCHFUL

NUM_VERIFIERS = 3
NO_VERIFIER_WAIT_S = 3.0
"""As whole_system.py sets it."""
SLACK_S = 10.0
"""For a machine that is busy with other things. With it every bound is below the 30 s after which commands give up:
nobody is found later than that, whoever looks."""


KILLING = f"{STEP_DELAY};verifier.forward=exit@chatcmpl-*"

rig = system_rig(
    "verifiers",
    verifiers=NUM_VERIFIERS,
    drafters=("suffix",),
    router_flags=WATCHFUL,
    proxied=[f"verifier-{index}" for index in range(NUM_VERIFIERS)],
    # Chat requests kill the verifier that computes them; all but the first choice of a request stop verifier-0.
    faults={f"verifier-{index}": KILLING for index in range(1, NUM_VERIFIERS)}
    | {"verifier-0": f"{KILLING};verifier.logits=freeze@cmpl-*-[123]"},
)


def busiest(rig: Rig) -> Process:
    return max(rig.system.verifiers, key=lambda process: process.metric("moot_num_sessions"))


def moves(rig: Rig, reason: str) -> float:
    return rig.system.router.metric("moot_request_moves_total", reason=reason)


def wait_ready(rig: Rig, count: int) -> None:
    wait_metric(rig.system.router, "moot_peers", equal_to(count), role="verifier", state="ready")


BREAKS: dict[str, Callable[[Rig, Process], None]] = {
    "killed": lambda rig, process: process.kill(),
    "frozen": lambda rig, process: process.freeze(),
    "reset": lambda rig, process: rig.system.proxies[process.name].reset(),
    "cut": lambda rig, process: rig.system.proxies[process.name].cut(),
    "partitioned": lambda rig, process: rig.system.proxies[process.name].partition(),
}


@pytest.mark.parametrize("how", ["killed", "frozen", "reset", "cut"])
def test_requests_move_to_another_verifier(rig: Rig, how: str) -> None:
    """Whatever takes a verifier away in mid-stream, its requests go on elsewhere with the same text."""
    before = moves(rig, "lost")
    rig.through(lambda: BREAKS[how](rig, busiest(rig)), count=3)
    assert moves(rig, "lost") > before


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_partition_is_found_within_three_heartbeats(rig: Rig, direction: str) -> None:
    """In either direction; a verifier that is found silent loses its requests as one that is frozen does. After it has
    healed, what the old stream still brings fits nothing, and the verifier is used again."""
    proxy = rig.system.proxies["verifier-0"]
    started = time.monotonic()
    proxy.partition(direction)
    # A heartbeat that is under way when the partition begins may still count.
    wait_ready(rig, NUM_VERIFIERS - 1)
    assert time.monotonic() - started < 4 * HEARTBEAT_S + SLACK_S
    proxy.heal()
    wait_ready(rig, NUM_VERIFIERS)
    rig.through(lambda: None, count=NUM_VERIFIERS)


def test_a_compute_thread_that_stands_still_is_found(rig: Rig) -> None:
    """A verifier whose event loop answers every heartbeat while nothing is computed is as lost as a dead one."""
    right, before = rig.expected(body(max_tokens=40)), moves(rig, "lost")
    reply = rig.ask(body(n=4, max_tokens=40), stream=False).result()
    assert reply.error is None, reply
    assert reply.token_ids == right.token_ids * 4
    assert moves(rig, "lost") > before
    # Its own probe says so as well, later; here it is ended as an orchestrator would.
    rig.system.verifiers[0].kill()


def test_a_terminated_verifier_hands_its_requests_over(rig: Rig) -> None:
    """SIGTERM in mid-stream: sessions move at once, none is lost, the process ends with status 0."""
    lost, drained = moves(rig, "lost"), moves(rig, "draining")
    gone: list[Process] = []

    def terminate() -> None:
        gone.append(busiest(rig))
        gone[0].terminate()

    rig.through(terminate, count=3)
    assert gone[0].wait() == 0, gone[0].log
    assert moves(rig, "draining") > drained
    assert moves(rig, "lost") == lost


def test_a_request_that_kills_is_quarantined(rig: Rig) -> None:
    """The second verifier that a request takes down convicts it; requests beside it go on where there is a third."""
    bodies = [body(index, max_tokens=120) for index in range(3)]
    with rig.under_way(bodies):
        rig.ask(chat_body(1), chat=True, stream=False).result().assert_refused(500, "request_poisoned")
    dead = [process for process in rig.system.verifiers if not process.is_running]
    assert [process.child.status for process in dead] == [EXIT_STATUS] * 2


@pytest.mark.parametrize("how", ["killed", "partitioned"])
def test_without_any_verifier_the_wait_is_bounded(rig: Rig, how: str) -> None:
    """503 with Retry-After before the first token, an error event after it, both in time; service returns by itself."""
    router = rig.system.router
    running_ask = rig.ask(body(0, max_tokens=400))
    running_ask.wait_tokens(5)
    # The one that serves comes last: a request that is there when two processes die would be taken for the cause.
    for process in sorted(rig.system.verifiers, key=lambda one: one.metric("moot_num_sessions")):
        BREAKS[how](rig, process)
    broken_at = time.monotonic()
    waiting = [rig.ask(body(1), stream=stream) for stream in (True, False)]
    found_in = 4 * HEARTBEAT_S + SLACK_S
    bound = found_in + NO_VERIFIER_WAIT_S + SLACK_S

    cut_off = running_ask.result(bound)
    assert cut_off.status == 200
    assert cut_off.error is not None, cut_off
    assert cut_off.error["code"] == "no_capacity"
    assert not cut_off.is_complete
    for ask in waiting:
        ask.result(bound).assert_refused(503, "no_capacity")
    assert time.monotonic() - broken_at < bound
    wait_metric(router, "moot_degraded", equal_to(1), mode="no_verifiers")
    # Nobody waits for what is known to be away.
    wait_refused_at_once(rig)
    rig.system.heal()
    wait_metric(router, "moot_peers", at_least(1), role="verifier", state="ready")
    assert router.metric("moot_degraded", mode="no_verifiers") == 0
    rig.ask_right(1)
    # What was shown before the end is the beginning of the right text.
    right = rig.expected(body(0, max_tokens=400))
    assert right.token_ids[: len(cut_off.token_ids)] == cut_off.token_ids


def wait_refused_at_once(rig: Rig) -> None:
    deadline = time.monotonic() + NO_VERIFIER_WAIT_S + SLACK_S
    while True:
        reply = Ask(rig.port, body(2), stream=False).result()
        assert reply.status == 503, reply
        if reply.seconds < NO_VERIFIER_WAIT_S / 2:
            return
        assert time.monotonic() < deadline, "new requests still wait for verifiers that are long gone"
