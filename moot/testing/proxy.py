"""A TCP proxy on loopback for fault tests: latency, cuts, resets and partitions between two ends that do not know of
it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct


class TcpProxy:
    """Listens on a free port and forwards to `host:port`. `latency_s` delays every piece in each direction.

    While partitioned, nothing passes in the named directions and neither end is told: what a broken network looks like.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.latency_s = 0.0
        self.refuse = False
        """New connections are closed at once."""
        self.heal()

    @classmethod
    def to(cls, address: str) -> TcpProxy:
        host, _, port = address.rpartition(":")
        return cls(host, int(port))

    @property
    def address(self) -> str:
        assert self._server is not None, "not started"
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def partition(self, *directions: str) -> None:
        """Stop `up` (to the server), `down` (to the client), or both when none is named."""
        for direction in directions or ("up", "down"):
            self._open[direction].clear()

    def heal(self) -> None:
        for event in self._open.values():
            event.set()

    def cut(self) -> None:
        """Close every connection in good order."""
        for writer in list(self._writers):
            writer.close()

    def reset(self) -> None:
        """End every connection with a TCP reset."""
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def __aenter__(self) -> TcpProxy:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, self._open["up"])),
            asyncio.create_task(self._pump(far_reader, writer, self._open["down"])),
        ]
        self._pumps.update(pumps)
        for pump in pumps:
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event) -> None:
        try:
            while data := await reader.read(65536):
                await passing.wait()
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            pass  # one end is gone, so the other is told below
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(ConnectionError, OSError, RuntimeError):
                writer.close()
