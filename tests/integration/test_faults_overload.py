"""More than can be served: drafting stops, then requests are refused at once, and those that were accepted go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from tests.integration.asking import Ask, assert_same
from tests.integration.faulty import Rig, body, system_rig
from tests.integration.processes import LOOPBACK, Process, at_least, equal_to, get, wait_metric
from tests.waiting import until

SEQS = 4
KEYS = ("one", "two", "three", "four")
LONG = 1900
COST = LONG + len(body(0)["prompt"].encode())
"""Tokens that a request of `LONG` counts in the queue."""


# Four places in the verifier and thousands of tokens of waiting room; the second router has little of it.
rig = system_rig(
    "overload",
    context=8192,
    verifier_flags=("--max-num-seqs", str(SEQS), "--max-waiting-seqs", "8"),
    router_flags=("--in-process-drafters", "suffix", "--asks", "all"),
    also=(
        *("--max-queued-tokens", str(3 * COST), "--max-queued-tokens-per-key", str(COST + 50)),
        *("--api-key", ",".join(KEYS), "--in-process-drafters", "suffix", "--asks", "all"),
        *("--no-verifier-wait-s", "30"),
    ),
)


@pytest.fixture
def narrow(rig: Rig) -> Process:
    """A router that lets three such requests wait, and one of each key."""
    return rig.system.routers[1]


@contextmanager
def busy(router: Process, num: int, num_with_tokens: int, key: str = "", **fields: object) -> Iterator[list[Ask]]:
    """`num` long requests, the first of which run; given up on leaving."""
    asks: list[Ask] = []
    before = router.metric("moot_num_requests_running")
    try:
        for index in range(num):
            asks.append(Ask(router.port, body(index, LONG, **fields), key=key))
            if index < num_with_tokens:
                asks[-1].wait_tokens(1)
        wait_metric(router, "moot_num_requests_running", at_least(before + num))
        yield asks
    finally:
        for ask in asks:
            ask.give_up()


def health_s(router: Process) -> float:
    """Median time of the least that a router is asked."""
    times = []
    for _ in range(20):
        begun = time.monotonic()
        assert get(router.port, "/health").status_code == 200
        times.append(time.monotonic() - begun)
    return statistics.median(times)


def turned_away(router: Process, shortage: str) -> float:
    return router.metric("moot_requests_turned_away_total", shortage=shortage)


def test_drafting_stops_before_anybody_is_refused(rig: Rig) -> None:
    """C32: with more than half of the waiting room taken no round drafts; with less they do again. Texts are right."""
    router = rig.system.router
    asked = body(0, 60)
    right = rig.expected(asked)
    before = router.metric("moot_draft_tokens_total")
    assert_same(rig.ask(asked).result(), right)
    assert router.metric("moot_draft_tokens_total") > before
    with busy(router, SEQS + 4, SEQS):
        assert router.metric("moot_degraded", mode="no_speculation") == 0
        with busy(router, 2, 0, drafters=["suffix"]):
            wait_metric(router, "moot_degraded", equal_to(1), mode="no_speculation")
            rounds, drafted = router.metric("moot_rounds_total"), router.metric("moot_draft_tokens_total")
            # Rounds that had been planned before draft on: one for each request that runs.
            wait_metric(router, "moot_rounds_total", at_least(rounds + 20 * SEQS))
            assert router.metric("moot_draft_tokens_total") - drafted <= 16 * SEQS
            assert turned_away(router, "places") == 0
        wait_metric(router, "moot_degraded", equal_to(0), mode="no_speculation")
        drafted = router.metric("moot_draft_tokens_total")
        wait_metric(router, "moot_draft_tokens_total", at_least(drafted + 1))


def test_a_full_verifier_is_known_before_it_is_asked(rig: Rig) -> None:
    """Every place and every waiting place taken: 503 with Retry-After at once, over HTTP and gRPC; health stays green,
    readiness too, refusals are counted by what was short, and a place that comes free is used. At once: within 50 ms,
    or on a busy machine within some times of what it takes to say that all is well."""
    router = rig.system.router
    before = turned_away(router, "places")
    with busy(router, SEQS + 8, SEQS) as asks:
        replies = [Ask(router.port, body(index), stream=index % 2 > 0).result() for index in range(20)]
        for reply in replies:
            reply.assert_refused(503, "no_capacity")
        assert statistics.median(reply.seconds for reply in replies) < max(0.05, 10 * health_s(router))
        with grpc.insecure_channel(f"{LOOPBACK}:{router.grpc_port}") as channel:
            call = router_service_pb2_grpc.RouterServiceStub(channel).Generate(pb.GenerateRequest(prompt="x"))
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert 1 <= int(dict(call.trailing_metadata())["retry-after"]) <= 60
        assert turned_away(router, "places") == before + 21
        assert [get(router.port, path).status_code for path in ("/health", "/readyz", "/livez")] == [200, 200, 200]
        asks[-1].give_up()
        wait_metric(router, "moot_num_requests_running", equal_to(SEQS + 7))
        last = Ask(router.port, body(1, 10))
        wait_metric(router, "moot_num_requests_running", equal_to(SEQS + 8))
        for ask in asks[:-1]:
            ask.give_up()
        assert_same(last.result(), rig.expected(body(1, 10)))


def test_tokens_that_wait_are_bounded_over_all_and_per_key(rig: Rig, narrow: Process) -> None:
    """A key with its share of the queue gets 429 while another is let in; with the whole queue taken all get 503. A
    request that is too large for either is served when nothing waits."""
    short = body(0, 60)
    with ExitStack() as stack:
        stack.enter_context(busy(narrow, SEQS + 1, SEQS, KEYS[0]))
        wait_metric(narrow, "moot_queued_tokens", equal_to(COST))
        Ask(narrow.port, short, key=KEYS[0]).result().assert_refused(429, "rate_limit_exceeded")
        assert turned_away(narrow, "caller_tokens") == 1
        for key in KEYS[1:3]:
            stack.enter_context(busy(narrow, 1, 0, key))
        wait_metric(narrow, "moot_queued_tokens", equal_to(3 * COST))
        Ask(narrow.port, short, key=KEYS[3]).result().assert_refused(503, "no_capacity")
        assert turned_away(narrow, "tokens") == 1
        assert narrow.probe("/readyz") == 200
    wait_metric(narrow, "moot_queued_tokens", equal_to(0))
    huge = body(2, 10, prompt=[index % 250 for index in range(3 * COST)])
    assert len(Ask(narrow.port, huge, key=KEYS[0]).result().token_ids) == 10


def test_routers_that_share_a_verifier_learn_that_it_is_full(rig: Rig, narrow: Process) -> None:
    """What a router has let in before it knew waits for a place and gets it; until then it refuses others at once."""
    (verifier,) = rig.system.verifiers
    asked = body(1, 10)
    right = rig.expected(asked)
    before = turned_away(narrow, "places")
    with busy(rig.system.router, SEQS + 8, SEQS) as asks:
        wait_metric(verifier, "moot_num_sessions", equal_to(SEQS + 8))
        waiting = Ask(narrow.port, asked, key=KEYS[0])
        wait_metric(narrow, "moot_num_requests_running", equal_to(1))
        until(lambda: is_refused_at_once(narrow), "the router knows")
        assert turned_away(narrow, "places") > before
        assert not waiting.is_over
        for ask in asks:
            ask.give_up()
        assert_same(waiting.result(), right)
    assert len(Ask(narrow.port, asked, key=KEYS[1]).result().token_ids) == 10


def is_refused_at_once(router: Process) -> bool:
    count = turned_away(router, "places")
    ask = Ask(router.port, body(2, 10), key=KEYS[1])
    until(lambda: ask.is_over or router.metric("moot_num_requests_running") == 2, "refused or let in")
    if turned_away(router, "places") == count:
        ask.give_up()
        wait_metric(router, "moot_num_requests_running", equal_to(1))
        return False
    ask.result().assert_refused(503, "no_capacity")
    return True


def test_refusing_costs_no_memory_and_disturbs_nobody(rig: Rig) -> None:
    """Two thousand refusals, as quickly as eight callers can ask: a running answer's pieces come as before, within what
    eight callers and their router take of a machine that has one core for all; the router's memory is what it was."""
    router = rig.system.router
    with busy(router, SEQS + 8, SEQS) as asks:
        quiet = asks[0].gap_s(40)
        refuse(router, 200)
        before = router.rss_bytes
        count = turned_away(router, "places")
        with ThreadPoolExecutor(1) as pool:
            refusing = pool.submit(refuse, router, 2000)
            loud = asks[0].gap_s(40)
            refusing.result()
        assert turned_away(router, "places") == count + 2000
        assert router.rss_bytes - before < 4e6, "more than 2 KB a refusal"
        assert loud < 10 * quiet, (loud, quiet)


def refuse(router: Process, count: int) -> None:
    def one(index: int) -> None:
        Ask(router.port, body(index), stream=False).result().assert_refused(503, "no_capacity")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
