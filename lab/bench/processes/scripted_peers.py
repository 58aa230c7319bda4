"""A process of scripted peers on the real wire: one verifier, some drafters, and delays on the way to peers.

    python -m lab.bench.processes.scripted_peers --fingerprint HEX [--drafters 3] [--step-ms 0] [--spoil 0.3]
                                             [--network-ms 0 --far HOST:PORT,...]

A spoilt proposal is right up to a drawn place. With --network-ms the verifier, and the drafters named by --far, which
are other processes, are reached through a delay. The ready file names the addresses. The process ends with its parent
or on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import selectors
import socket
import threading
import time
from pathlib import Path

from moot.rpc.grpc_server import termination_event, write_ready_file
from moot.testing.scripted_drafter import ScriptedDrafter
from moot.testing.scripted_verifier import ScriptedVerifier

_OWN_S = 1e-4
"""What a piece spends in the line beyond its sleep (sleeping too long, waking two threads): taken off the sleep."""
_PIECES = 1024
"""Pieces under way in one direction at most: more wait in the sender's socket."""


class DelayLine:
    """Listens on a free port of loopback and forwards to `address` (HOST:PORT), `delay_s` seconds later, each way:
    every piece passes after the same time, in order, however many are under way.

    Threads, as their sleep is exact to a tenth of a millisecond; an event loop's timers count whole ones.
    """

    def __init__(self, address: str, delay_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(_PIECES)
                    threading.Thread(target=self._read, args=(one, pieces), daemon=True).start()
                    threading.Thread(target=self._write, args=(other, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            pieces.put((time.monotonic() + self._delay_s, data))

    def _write(self, drain: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):  # one end is gone, so the other is told
            while True:
                due, data = pieces.get()
                time.sleep(max(due - _OWN_S - time.monotonic(), 0.0))
                if not data:
                    break
                drain.sendall(data)
        with contextlib.suppress(OSError):
            drain.shutdown(socket.SHUT_RDWR)


async def serve(arguments: argparse.Namespace) -> None:
    ended = termination_event()
    async with contextlib.AsyncExitStack() as stack:

        def far(address: str) -> str:
            """Where the peer at `address` is reached."""
            if not arguments.network_ms:
                return address
            line = stack.enter_context(contextlib.closing(DelayLine(address, arguments.network_ms / 1e3)))
            return line.address

        verifier = ScriptedVerifier(tokenizer_fingerprint=arguments.fingerprint, max_num_seqs=256)
        verifier.step_s = arguments.step_ms / 1e3
        await stack.enter_async_context(verifier)
        drafters = [far(address) for address in arguments.far.split(",") if address]
        for index in range(arguments.drafters):
            drafter = ScriptedDrafter(seed=index, spoil=arguments.spoil, tokenizer_fingerprint=arguments.fingerprint)
            drafters.append((await stack.enter_async_context(drafter)).address)
        write_ready_file(arguments.ready_file, verifier=far(verifier.address), drafters=drafters)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--spoil", type=float, default=0.3)
    parser.add_argument("--network-ms", type=float, default=0.0)
    parser.add_argument("--far", default="")
    parser.add_argument("--ready-file", type=Path)
    arguments = parser.parse_args()
    # epoll's time-outs are whole milliseconds, rounded up: a step of 30 would take 31. Those of select are not.
    timely = (lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) if arguments.network_ms else None
    with asyncio.Runner(loop_factory=timely) as runner:
        runner.run(serve(arguments))


if __name__ == "__main__":
    main()
