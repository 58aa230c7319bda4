"""C25: SIGTERM for a router, for the only verifier and for the only drafter, while twenty streams run: they finish, and
are right."""

from __future__ import annotations

import httpx

from tests.integration.asking import Ask, Reply, assert_same
from tests.integration.faulty import Rig, body, system_rig
from tests.integration.processes import Process, equal_to, get, wait_metric
from tests.waiting import until

rig = system_rig("terminated", drafters=("suffix",))

BODIES = [body(index % 4, max_tokens=240) for index in range(20)]
"""Long enough that something can happen before they end, on a slow machine as well."""


def begun(rig: Rig, port: int) -> tuple[list[Ask], list[Reply]]:
    """All of them in mid-stream, and their right answers."""
    expected = rig.all_expected(BODIES)
    asks = [Ask(port, asked) for asked in BODIES]
    for ask in asks:
        ask.wait_tokens(2)
    return asks, expected


def assert_all_right(asks: list[Ask], expected: list[Reply]) -> None:
    for ask, right in zip(asks, expected, strict=True):
        assert_same(ask.result(), right)


def is_not_ready(process: Process) -> bool:
    try:
        return process.probe("/readyz") == 503
    except httpx.TransportError:
        return True  # ended already


def test_a_router_drains(rig: Rig) -> None:
    """C25: not ready at once, new requests 503 with Retry-After, all streams finish right."""
    router = rig.system.add_router()
    asks, expected = begun(rig, router.port)
    router.terminate()
    until(lambda: router.probe("/readyz") == 503, "readiness is off")
    assert get(router.port, "/readyz").status_code == 503
    assert get(router.port, "/livez").status_code == 200
    refused = Ask(router.port, body(0), stream=False).result()
    assert any(not ask.is_over for ask in asks), "readiness went off after the streams"
    refused.assert_refused(503, "draining")
    assert_all_right(asks, expected)
    assert router.wait() == 0, router.log


def test_a_drain_is_bounded(rig: Rig) -> None:
    """What has not finished when the grace is over is told so, and the process ends."""
    router = rig.system.add_router(("--drain-grace-s", "1"))
    long = [Ask(router.port, body(0, max_tokens=1900)), Ask(router.port, body(1, max_tokens=1900), stream=False)]
    long[0].wait_tokens(3)
    router.terminate()
    assert router.wait() == 0, router.log
    streamed, whole = [ask.result() for ask in long]
    assert streamed.error is not None, streamed
    assert streamed.error["code"] == "draining"
    assert not streamed.is_complete
    assert whole.status == 503, whole
    shown = body(0, max_tokens=len(streamed.token_ids))
    assert rig.expected(shown).token_ids == streamed.token_ids


def test_the_only_verifier_finishes_what_it_has(rig: Rig) -> None:
    """C25: not ready at once, no new session, new requests 503 with Retry-After; all its streams finish right where
    they are, since nobody else could take them, and then it ends with status 0. Another one in its place is found."""
    (verifier,), router = rig.system.verifiers, rig.system.router
    asks, expected = begun(rig, rig.port)
    verifier.terminate()
    until(lambda: verifier.probe("/readyz") == 503, "readiness is off")
    assert verifier.probe("/livez") == 200
    wait_metric(router, "moot_peers", equal_to(1), role="verifier", state="draining")
    assert not all(ask.is_over for ask in asks), "readiness went off after the streams"
    Ask(rig.port, body(0), stream=False).result().assert_refused(503, "no_capacity", "draining")
    assert_all_right(asks, expected)
    assert router.metric("moot_request_moves_total") == 0
    assert verifier.wait() == 0, verifier.log
    verifier.restart()
    wait_metric(router, "moot_peers", equal_to(1), role="verifier", state="ready")
    rig.ask_right()


def test_the_only_drafter_is_let_go(rig: Rig) -> None:
    """C25: not ready, left by its streams, which go on without drafts and finish right, as new ones do; it ends with
    status 0 long before them."""
    drafter, router = rig.system.drafters["suffix"], rig.system.router
    asks, expected = begun(rig, rig.port)
    wait_metric(drafter, "moot_num_sessions", equal_to(len(BODIES)))
    drafter.terminate()
    until(lambda: is_not_ready(drafter), "readiness is off")
    assert drafter.wait() == 0, drafter.log
    assert any(not ask.is_over for ask in asks), "it waited for the streams"
    rig.ask_right(1)
    wait_metric(router, "moot_degraded", equal_to(1), mode="no_drafters")
    assert_all_right(asks, expected)
    drafter.restart()
    wait_metric(router, "moot_peers", equal_to(1), role="drafter", state="ready")
    rig.ask_right()
