"""What one hop between two processes costs on this machine, at work and after a pause: under the router's turns.

    python -m bench.hops [--messages 200] [--pause-ms 10] [--repetitions 7]

A message of 50 bytes to another process and the answer back, over a TCP socket of loopback and over a stream of gRPC's
asyncio API, one after the other without a pause, and with one before each. There and back are told apart by the
monotonic clock, which both processes share. A processor that was idle has to be woken, and finds its caches cold.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from lab.bench.intervals import Interval
from lab.bench.report import publish

MESSAGE = b"x" * 50
Hop = tuple[float, float]
"""Microseconds there and back."""


def _echo_socket(port: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.put(listener.getsockname()[1])
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(4096):
            connection.sendall(b"%d" % time.monotonic_ns())


def _echo_stream(port: Any) -> None:
    async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in messages:
            yield b"%d" % time.monotonic_ns()

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Echo": handler}),))
        port.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


@contextmanager
def _peer(echo: Callable[[Any], None]) -> Iterator[int]:
    """A process that echoes; gives its port."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=echo, args=(port,), daemon=True)
    process.start()
    try:
        yield port.get(timeout=30)
    finally:
        process.kill()
        process.join()


def over_socket(port: int, count: int, pause_s: float) -> list[Hop]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hops = []
        for _ in range(count):
            time.sleep(pause_s)
            sent = time.monotonic_ns()
            connection.sendall(MESSAGE)
            there = int(connection.recv(4096))
            hops.append(((there - sent) / 1e3, (time.monotonic_ns() - there) / 1e3))
        return hops


def over_stream(port: int, count: int, pause_s: float) -> list[Hop]:
    async def run() -> list[Hop]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/bench/Echo")()
            hops = []
            for _ in range(count):
                await asyncio.sleep(pause_s)
                sent = time.monotonic_ns()
                await call.write(MESSAGE)
                there = int(await call.read())
                hops.append(((there - sent) / 1e3, (time.monotonic_ns() - there) / 1e3))
            call.cancel()
            return hops

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    found: dict[str, list[Hop]] = {}
    for index in range(arguments.repetitions):
        for name, echo, ask in (("socket", _echo_socket, over_socket), ("gRPC stream", _echo_stream, over_stream)):
            for pause in (0.0, arguments.pause_ms):
                with _peer(echo) as port:
                    hops = ask(port, arguments.messages, pause / 1e3)
                there, back = (statistics.median(times) for times in zip(*hops, strict=True))
                found.setdefault(f"{name}, {f'after {pause:g} ms' if pause else 'at work'}", []).append((there, back))
        print(f"repetition {index + 1} of {arguments.repetitions}", flush=True)
    rows = [(name, *(Interval.of(times).text(0) for times in zip(*hops, strict=True))) for name, hops in found.items()]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.boxplot([[sum(hop) for hop in hops] for hops in found.values()], tick_labels=list(found))
        axes.set(title="There and back, microseconds", ylim=(0, None))

    publish("hops", ("hop", "there, us", "back, us"), rows, {"hops_us": found}, draw)


if __name__ == "__main__":
    main()
