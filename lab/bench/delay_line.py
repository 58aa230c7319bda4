"""A TCP connection with a delay: every piece passes after the same time, in order, however many are under way.

Threads, as their sleep is exact to a tenth of a millisecond; an event loop's timers count whole ones.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

_OWN_S = 1e-4
"""What a piece spends in the line beyond its sleep (sleeping too long, waking two threads): taken off the sleep."""
_PIECES = 1024
"""Pieces under way in one direction at most: more wait in the sender's socket."""


class DelayLine:
    """Listens on a free port of loopback and forwards to `address` (HOST:PORT), `delay_s` seconds later, each way."""

    def __init__(self, address: str, delay_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

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
                    _start(self._read, one, pieces)
                    _start(self._write, other, pieces)

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


def _start(call: object, *arguments: object) -> None:
    threading.Thread(target=call, args=arguments, daemon=True).start()  # type: ignore[arg-type]
