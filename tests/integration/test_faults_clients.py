"""Clients that vanish, a request that is poisoned, a router that goes away: nobody else notices, nothing is left."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Ask, assert_same, complete
from tests.integration.faulty import STEP_DELAY, Rig, body, chat_body
from tests.integration.processes import equal_to, get, wait_metric
from tests.integration.whole_system import running
from tests.waiting import until


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The target's numbers are NaN for chat requests."""
    folder = tmp_path_factory.mktemp("clients")
    with running(
        folder / "logs",
        make_tiny_model(folder / "tiny"),
        drafters={"suffix": "suffix", "lookup": "prompt_lookup"},
        faults={"verifier-0": f"{STEP_DELAY};verifier.logits=nan@chatcmpl-*"},
    ) as system:
        yield Rig(system)


@pytest.fixture(autouse=True)
def nothing_left(rig: Rig) -> Iterator[None]:
    yield
    rig.system.assert_idle()


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_is_gone_leaves_nothing(rig: Rig, stream: bool) -> None:
    """Sessions, KV and places are free a moment later on all pods, each time, which the count of aborts tells from the
    answers' own ends, half a minute later; whoever stays gets the right text."""
    router, (verifier,) = rig.system.router, rig.system.verifiers
    stays, right = body(1, max_tokens=60), rig.expected(body(1, max_tokens=60))
    aborted = router.metric("moot_requests_total", finish_reason="abort")
    num_waves, num_gone = 4, 6
    for _ in range(num_waves):
        neighbour = rig.ask(stays)
        leaving = [rig.ask(body(index, max_tokens=1500, n=1 + index % 2), stream=stream) for index in range(num_gone)]
        neighbour.wait_tokens(5)
        wait_metric(verifier, "moot_num_sessions", lambda value: value > num_gone)
        for ask in leaving:
            ask.give_up()
        assert_same(neighbour.result(), right)
        rig.system.assert_idle()
    num_choices = sum(1 + index % 2 for index in range(num_gone))
    assert router.metric("moot_requests_total", finish_reason="abort") == aborted + num_waves * num_choices


def test_clients_that_leave_at_any_moment_leave_nothing(rig: Rig) -> None:
    """Before the first token, in the middle, with the end: a hundred times, one after the other."""
    for index in range(100):
        ask = rig.ask(body(index % 4, max_tokens=1 + index % 12), stream=index % 3 > 0)
        time.sleep(0.002 * (index % 25))  # no wait for anything: a different moment each time
        ask.give_up()
    rig.system.assert_idle()
    rig.ask_right()


def test_a_client_that_leaves_while_no_verifier_answers(rig: Rig) -> None:
    """A request whose verifier says nothing is given up like any other; a verifier that wakes again frees it."""
    (verifier,) = rig.system.verifiers
    aborted = rig.system.router.metric("moot_requests_total", finish_reason="abort")
    started = rig.ask(body(0, max_tokens=1000))
    started.wait_tokens(3)
    verifier.freeze()
    try:
        waiting = [rig.ask(body(1), stream=False), rig.ask(body(2)), started]
        wait_metric(rig.system.router, "moot_num_requests_running", equal_to(3))
        for ask in waiting:
            ask.give_up()
        wait_metric(rig.system.router, "moot_num_requests_running", equal_to(0))
        # Not because their waits were over.
        assert rig.system.router.metric("moot_requests_total", finish_reason="abort") == aborted + 3
    finally:
        verifier.thaw()
    rig.system.wait_for_peers()
    rig.ask_right()


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_poisoned_request_fails_alone(rig: Rig, stream: bool) -> None:
    """Numbers that are not finite end their own request; those in the same batch go on with the right text."""
    num_moves = rig.system.router.metric("moot_request_moves_total")
    bodies = [body(index, max_tokens=60) for index in range(3)]
    expected = rig.all_expected(bodies)
    asks = [rig.ask(asked) for asked in bodies]
    for ask in asks:
        ask.wait_tokens(3)
    for index in range(3):
        poisoned = rig.ask(chat_body(index), chat=True, stream=stream).result()
        assert poisoned.status == 500, poisoned
        assert poisoned.error is not None
        assert poisoned.error["code"] == "request_poisoned"
    for ask, right in zip(asks, expected, strict=True):
        assert_same(ask.result(), right)
    assert rig.system.router.metric("moot_request_moves_total") == num_moves, "no verifier was blamed for it"


def test_a_terminated_router_drains(rig: Rig) -> None:
    """C25: SIGTERM with 20 streams: not ready at once, new requests 503 with Retry-After, all streams finish right."""
    bodies = [body(index % 4, max_tokens=240) for index in range(20)]
    expected = rig.all_expected(bodies)
    router = rig.system.add_router()
    asks = [Ask(router.port, asked) for asked in bodies]
    for ask in asks:
        ask.wait_tokens(2)
    router.terminate()
    until(lambda: router.probe("/readyz") == 503, "readiness is off")
    assert get(router.port, "/readyz").status_code == 503
    assert get(router.port, "/livez").status_code == 200
    refused = Ask(router.port, body(0), stream=False).result()
    assert any(not ask.is_over for ask in asks), "readiness went off after the streams"
    assert refused.status == 503, refused
    assert refused.error is not None
    assert refused.error["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    for ask, right in zip(asks, expected, strict=True):
        assert_same(ask.result(), right)
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
    assert complete(rig.port, body(0, max_tokens=len(streamed.token_ids))).token_ids == streamed.token_ids
