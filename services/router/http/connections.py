"""Connections whose reader is slow: how much waits for it, and how long."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger(__name__)

_NO_LINGER = struct.pack("ii", 1, 0)


def connections(buffer_bytes: int, timeout_s: float, on_slow: Callable[[], None]) -> type[asyncio.Protocol]:
    """The class of a server's connections.

    At most `buffer_bytes` and one event wait in the process for a connection's reader, and `buffer_bytes` unsent in the
    system; then whoever writes waits. A reader that has not taken three quarters of what filled the buffer (or all that
    was left of a finished answer) within `timeout_s` is cut off: the connection is reset, and `on_slow` called.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, as what is installed says
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=buffer_bytes)
            raw = transport.get_extra_info("socket")
            # Not on every system; without it the send buffer of the system comes on top.
            if raw is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, buffer_bytes)

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unwatch()

        def on_response_complete(self) -> None:
            # What follows may be a request that has come already, and its answer: judged by itself.
            self._unwatch()
            super().on_response_complete()
            if self.transport.get_write_buffer_size() and self._timer is None:
                self._watch()

        def data_received(self, data: bytes) -> None:
            # The next request: from here on what waits is not what is left of a finished answer.
            if not self.flow.write_paused:
                self._unwatch()
            super().data_received(data)

        def _watch(self) -> None:
            self._unwatch()
            size = self.transport.get_write_buffer_size()
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look, size)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _look(self, before: int) -> None:
            """Nothing was written since there were `before` bytes: what is missing was read."""
            self._timer = None
            left = self.transport.get_write_buffer_size()
            if not left:
                return
            if before - left >= buffer_bytes * 3 // 4:
                self._watch()
                return
            on_slow()
            log.info("a slow reader is cut off", extra={"num_bytes": left})
            if (raw := self.transport.get_extra_info("socket")) is not None:
                # Reset: else the system goes on offering what it holds to a reader that takes its time.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()

    return Connection
