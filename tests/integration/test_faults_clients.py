"""Clients that vanish, read slowly or not at all, on real sockets, or whose request is poisoned: little waits for them,
nobody else notices, nothing is left."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from tests.integration.asking import assert_same
from tests.integration.faulty import STEP_DELAY, Rig, body, chat_body, system_rig
from tests.integration.processes import LOOPBACK, Process, at_least, equal_to, wait_metric
from tests.waiting import GIVE_UP_S, until

TIMEOUT_S = 1.5
BUFFER_BYTES = 8192
MANY = {"max_tokens": 1900, "n": 4, "logprobs": 20, "num_speculative_tokens": 3}
"""Some ten megabytes of answer, of which a stream may hold some tens of kilobytes."""

rig = system_rig(
    "clients",
    drafters=("suffix",),
    router_flags=("--slow-client-timeout-s", str(TIMEOUT_S), "--stream-buffer-bytes", str(BUFFER_BYTES)),
    verifier_flags=("--max-num-seqs", "24"),
    # The target's numbers are NaN for chat requests.
    faults={"verifier-0": f"{STEP_DELAY};verifier.logits=nan@chatcmpl-*"},
)


@pytest.fixture(autouse=True)
def no_connection(rig: Rig) -> Iterator[None]:
    """No connection of a client is left."""
    until(lambda: num_connections(rig.system.router) == 0, "no client is connected")
    yield
    until(lambda: num_connections(rig.system.router) == 0, "the router has closed the connections")


def num_connections(router: Process) -> int:
    """Established ones at its HTTP port, as the system counts them for its process."""
    found = 0
    inodes = set()
    for entry in Path(f"/proc/{router.child.process.pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        is_ours = f"socket:[{fields[9]}]" in inodes and int(fields[1].split(":")[1], 16) == router.port
        found += is_ours and fields[3] != "0A"
    return found


@contextmanager
def sent(port: int, asked: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection with a small receive buffer on which a request was sent, and nothing is read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(GIVE_UP_S)
        connection.connect((LOOPBACK, port))
        data = json.dumps({"stream": True} | asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + data)
        yield connection


def read_on(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def cut(router: Process, api: str = "http") -> float:
    return router.metric("moot_slow_clients_total", api=api)


def gap_s(rig: Rig, index: int) -> float:
    """Median time between pieces of a neighbour's answer, which must be right."""
    asked = body(index, 60, num_speculative_tokens=0)
    ask = rig.ask(asked)
    gap = ask.gap_s()
    assert_same(ask.result(), rig.expected(asked))
    return gap


def test_who_reads_nothing_is_paused_and_then_cut_off(rig: Rig) -> None:
    """C24: six at once: few bytes wait for each while the verifier does nothing, a neighbour's answer is right and as
    quick as alone, and after the time in which nothing was read each is cut off."""
    router = rig.system.router
    alone = [gap_s(rig, index) for index in range(2)]
    before, tokens, memory = cut(router), router.metric("moot_generation_tokens_total"), router.rss_bytes
    with ExitStack() as stack:
        for index in range(6):
            stack.enter_context(sent(router.port, body(index) | MANY))
        beside = [gap_s(rig, index) for index in range(2)]
        wait_metric(router, "moot_slow_clients_total", at_least(before + 6), api="http")
        rig.system.assert_idle()
    made = router.metric("moot_generation_tokens_total") - tokens - 2 * 60
    assert made < 0.2 * 6 * 4 * 1900, "they were not paused"
    assert router.rss_bytes - memory < 20e6
    assert min(beside) < 8 * max(alone), (beside, alone)


def test_who_reads_a_byte_a_second_is_cut_off(rig: Rig) -> None:
    """Progress is three quarters of the buffer in the time, not a byte: the connection is reset under the reader."""
    router = rig.system.router
    before = cut(router)
    with sent(router.port, body(1) | MANY) as connection:
        deadline = time.monotonic() + GIVE_UP_S
        while cut(router) == before and time.monotonic() < deadline:
            assert connection.recv(1)
            time.sleep(0.2)
        with pytest.raises(ConnectionResetError):
            read_on(connection)
    assert cut(router) == before + 1


def test_who_reads_slowly_but_steadily_gets_everything(rig: Rig) -> None:
    """A few times the buffer in the time is enough, though the answer takes many times the time."""
    router = rig.system.router
    before = cut(router)
    asked = body(2, 60, logprobs=20)
    received = bytearray()
    with sent(router.port, asked | {"n": 4}) as connection:
        while b"data: [DONE]" not in received:
            received += connection.recv(4096)
            time.sleep(0.04)
    assert len(received) > 15 * BUFFER_BYTES
    assert cut(router) == before


@pytest.mark.parametrize("keeps", [True, False], ids=["keep-alive", "close"])
def test_a_whole_answer_nobody_reads_ends_too(rig: Rig, keeps: bool) -> None:
    """It was made, and is let go of when nobody takes it: not the request's places, nor its connection are kept."""
    router = rig.system.router
    before = cut(router)
    asked = body(1, 100, n=4, logprobs=20, stream=False)
    with sent(router.port, asked) as connection:
        if not keeps:
            connection.shutdown(socket.SHUT_WR)
        if keeps:
            wait_metric(router, "moot_slow_clients_total", at_least(before + 1), api="http")
        rig.system.assert_idle()


def test_grpc_callers_that_read_nothing_are_cut_off(rig: Rig) -> None:
    """As over HTTP: paused, then ended with DEADLINE_EXCEEDED; neighbours get their texts meanwhile."""
    router = rig.system.router
    before, tokens = cut(router, "grpc"), router.metric("moot_generation_tokens_total")
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    with grpc.insecure_channel(f"{LOOPBACK}:{router.grpc_port}", options) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        fields = MANY | {"prompt": "x", "ignore_eos": True}
        calls = [stub.Generate(pb.GenerateRequest(seed=seed, **fields)) for seed in range(3)]
        for call in calls:
            next(call)
        rig.ask_right(1)
        wait_metric(router, "moot_slow_clients_total", at_least(before + 3), api="grpc")
        rig.system.assert_idle()
        made = router.metric("moot_generation_tokens_total") - tokens
        assert made < 0.5 * 3 * 4 * 1900, "they were not paused"
        for call in calls:
            with pytest.raises(grpc.RpcError) as ended:
                for _ in call:
                    pass
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_is_gone_leaves_nothing(rig: Rig, stream: bool) -> None:
    """C24: sessions, KV and places are free a moment later on all pods, each time, which the count of aborts tells from
    the answers' own ends, half a minute later; whoever stays gets the right text."""
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
    with rig.under_way(bodies):
        for index in range(3):
            rig.ask(chat_body(index), chat=True, stream=stream).result().assert_refused(500, "request_poisoned")
    assert rig.system.router.metric("moot_request_moves_total") == num_moves, "no verifier was blamed for it"
