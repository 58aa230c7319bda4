"""Links between pods: settings that both ends share, queues of frames, and what a failed call says of a peer.

Keepalive, deadlines and message sizes stand in one config, so that both ends agree. Measured with grpcio 1.85:
keepalive alone takes a minute to notice a frozen peer; with http2.ping_timeout set it takes one to two seconds. A
client that pings faster than the server allows is cut off with "too many pings".

`FrameQueue` is a bounded queue whose reader takes all that is there at once, as far as one message holds it: few
frames. `Handed` writes a message and learns the moment in which gRPC has it. `failure_of` says why a peer could not be
asked what it is, as far as gRPC tells: for logs, and for how soon to try again.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from moot.core.errors import PeerLost, PeerRefused
from moot.core.options import Options, option
from moot.rpc.tls import PodTls

ItemT = TypeVar("ItemT")

ITEM_OVERHEAD_BYTES = 16
"""More than what a repeated field adds to each of its messages: a tag and a length."""


class FrameQueueFull(Exception):
    """The reader does not keep up: the owner of the stream ends it, which frees everything behind it."""


class FrameQueue(Generic[ItemT]):
    """A bounded queue of frames: one event loop, any number of writers, one reader.

    `put` never waits: past `max_items` it raises FrameQueueFull. `next_frame` waits for at least one item and returns
    up to `max_frame_items` of them, fewer when their sum would be more than `max_frame_bytes` (an item that is larger
    than that comes alone); after `close` it drains what is left, then returns an empty list. `size_of`: an item's
    bytes.
    """

    def __init__(
        self,
        max_items: int = 8192,
        max_frame_items: int = 256,
        max_frame_bytes: int = 0,
        size_of: Callable[[ItemT], int] = lambda item: 0,
    ) -> None:
        self._items: deque[ItemT] = deque()
        self._max_items = max_items
        self._max_frame_items = max_frame_items
        self._max_frame_bytes = max_frame_bytes
        self._size_of = size_of
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, item: ItemT) -> None:
        if self._closed:
            return
        if len(self._items) >= self._max_items:
            raise FrameQueueFull(f"{self._max_items} items wait to be written")
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def next_frame(self) -> list[ItemT]:
        while not self._items and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        frame: list[ItemT] = []
        num_bytes = 0
        while self._items and len(frame) < self._max_frame_items:
            num_bytes += self._size_of(self._items[0]) + ITEM_OVERHEAD_BYTES
            if frame and 0 < self._max_frame_bytes < num_bytes:
                break
            frame.append(self._items.popleft())
        return frame

    def take_all(self) -> list[ItemT]:
        """All that is there, in however many frames it would come."""
        items, self._items = list(self._items), deque()
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Handed(Generator[Any, Any, None]):
    """A write of one message that tells when gRPC has it. `await Handed(call.write(message), note)`: as `await
    call.write(message)`, and `note()` is called on the way.

    gRPC puts a message on the connection within the call that takes it, unless the peer's window is full; that it has
    done so it tells through its own thread and the event loop, after everything else that the loop has to do. `note`
    is called when the first part is done. Not when it fails.
    """

    __slots__ = ("_note", "_steps")

    def __init__(self, write: Coroutine[Any, Any, None], note: Callable[[], None]) -> None:
        self._steps: Generator[Any, Any, None] = write.__await__()
        self._note: Callable[[], None] | None = note

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: Any) -> Any:
        try:
            waits_for = self._steps.send(value)
        except StopIteration:
            self._tell()
            raise
        self._tell()
        return waits_for

    def throw(self, error: Any, value: Any = None, trace: Any = None) -> Any:
        return self._steps.throw(error if value is None else value)

    def _tell(self) -> None:
        note, self._note = self._note, None
        if note is not None:
            note()


# Texts of grpcio 1.85; what is not recognised is told as it is.
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_OTHER_NAME = "Hostname Verification Check failed"
_NO_TLS = "WRONG_VERSION_NUMBER"
_NEVER_CONNECTED = "failed to connect to all addresses"


def failure_of(error: grpc.aio.AioRpcError, server_name: str | None) -> PeerRefused | PeerLost:
    """The error of a failed call: PeerRefused where trying again at once is in vain. `server_name`: expected in the
    peer's certificate; None: no TLS here."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return PeerRefused(details)
    if _OTHER_NAME in details:
        return PeerRefused(f"its certificate is not that of {server_name}")
    if match := _UNTRUSTED.search(details):
        return PeerRefused(f"its certificate is not trusted: {match[1]}")
    if _NO_TLS in details:
        return PeerRefused("it does not speak TLS, which this side does")
    if details.startswith(_NEVER_CONNECTED) and "Socket closed" in details:
        guess = "may want TLS" if server_name is None else "may refuse this side's certificate: its log says why"
        return PeerLost(f"it closed the connection before it answered; it {guess}")
    return PeerLost(f"{error.code().name}: {details}")


HEARTBEAT_INTERVAL_S = 1.0
"""Between heartbeats on a stream, by either end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig(Options):
    """Options of both ends of a link; durations in milliseconds, sizes in bytes."""

    max_message_bytes: int = option(
        16 * 1024 * 1024, help="size limit of one frame in bytes, equal on both sides", minimum=1
    )
    keepalive_time_ms: int = option(5_000, help="milliseconds between keepalive pings, equal on both sides", minimum=1)
    keepalive_timeout_ms: int = option(
        3_000, help="milliseconds until an unanswered ping ends the connection", minimum=1
    )

    def _common(self) -> list[tuple[str, int]]:
        return [
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
        ]

    def channel_options(self) -> list[tuple[str, int]]:
        return [
            *self._common(),
            # Reconnect quickly: a restarted pod is back in a second, not after gRPC's default of up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # One channel, one connection: channels to equal addresses must not share a subchannel's backoff.
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def server_options(self, reuse_port: bool = False) -> list[tuple[str, int]]:
        """`reuse_port`: whether other processes may listen on the same port."""
        return [
            *self._common(),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", self.keepalive_time_ms // 2),
            # A process that was held up receives its pings in a burst: three bursts in the life of an idle connection
            # must not end it. Both ends are ours, so nobody pings to do harm.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", int(reuse_port)),
        ]


STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)
"""What reading or writing a dead stream raises; `write` may raise InvalidStateError beside AioRpcError."""


def open_channel(
    address: str, config: LinkConfig, tls: PodTls | None = None, role: str = "verifier"
) -> grpc.aio.Channel:
    """A channel to one pod, in plain text unless there is `tls`; then the pod must prove that it plays `role`.

    Must be called on a running event loop.
    """
    if tls is not None:
        return tls.open_channel(address, role, config.channel_options())
    return grpc.aio.insecure_channel(address, options=config.channel_options())
