"""C25: SIGTERM for the only verifier, and for the only drafter, while twenty streams run: they finish, right."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Ask, assert_same
from tests.integration.faulty import STEP_DELAY, Rig, body
from tests.integration.processes import Process, equal_to, wait_metric
from tests.integration.whole_system import running
from tests.waiting import until

NUM_STREAMS = 20
LENGTH = 240
"""Long enough that something can happen before they end, on a slow machine as well."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("terminated")
    model = make_tiny_model(folder / "tiny")
    with running(folder / "logs", model, drafters=("suffix",), faults={"verifier-0": STEP_DELAY}) as system:
        yield Rig(system)


def begin_streams(rig: Rig) -> list[Ask]:
    asks = [rig.ask(body(index % 4, max_tokens=LENGTH)) for index in range(NUM_STREAMS)]
    for ask in asks:
        ask.wait_tokens(2)
    return asks


def assert_all_right(rig: Rig, asks: list[Ask]) -> None:
    expected = rig.all_expected([body(index % 4, max_tokens=LENGTH) for index in range(4)])
    for index, ask in enumerate(asks):
        assert_same(ask.result(), expected[index % 4])


def is_not_ready(process: Process) -> bool:
    try:
        return process.probe("/readyz") == 503
    except httpx.TransportError:
        return True  # ended already


def test_the_only_verifier_finishes_what_it_has(rig: Rig) -> None:
    """C25: not ready at once, no new session, new requests 503 with Retry-After; all its streams finish right where
    they are, since nobody else could take them, and then it ends with status 0. Another one in its place is found."""
    (verifier,), router = rig.system.verifiers, rig.system.router
    rig.all_expected([body(index % 4, max_tokens=LENGTH) for index in range(4)])
    asks = begin_streams(rig)
    verifier.terminate()
    until(lambda: verifier.probe("/readyz") == 503, "readiness is off")
    assert verifier.probe("/livez") == 200
    wait_metric(router, "moot_peers", equal_to(1), role="verifier", state="draining")
    assert not all(ask.is_over for ask in asks), "readiness went off after the streams"
    refused = Ask(rig.port, body(0), stream=False).result()
    assert refused.status == 503, refused
    assert int(refused.headers["retry-after"]) >= 1
    assert_all_right(rig, asks)
    assert router.metric("moot_request_moves_total") == 0
    assert verifier.wait() == 0, verifier.log
    verifier.restart()
    wait_metric(router, "moot_peers", equal_to(1), role="verifier", state="ready")
    rig.ask_right()
    rig.system.assert_idle()


def test_the_only_drafter_is_let_go(rig: Rig) -> None:
    """C25: not ready, left by its streams, which go on without drafts and finish right, as new ones do; it ends with
    status 0 long before them."""
    drafter, router = rig.system.drafters["suffix"], rig.system.router
    rig.all_expected([body(index % 4, max_tokens=LENGTH) for index in range(4)])
    asks = begin_streams(rig)
    wait_metric(drafter, "moot_num_sessions", equal_to(NUM_STREAMS))
    drafter.terminate()
    until(lambda: is_not_ready(drafter), "readiness is off")
    assert drafter.wait() == 0, drafter.log
    assert any(not ask.is_over for ask in asks), "it waited for the streams"
    rig.ask_right(1)
    wait_metric(router, "moot_degraded", equal_to(1), mode="no_drafters")
    assert_all_right(rig, asks)
    drafter.restart()
    wait_metric(router, "moot_peers", equal_to(1), role="drafter", state="ready")
    rig.ask_right()
    rig.system.assert_idle()
