"""Settings that both ends of a link must share: keepalive, deadlines, message sizes. One config, so they agree.

Measured with grpcio 1.85: keepalive alone takes a minute to notice a frozen peer; with http2.ping_timeout set it
takes one to two seconds. A client that pings faster than the server allows is cut off with "too many pings".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio

from moot.config import option
from moot.core.errors import ConfigError
from moot.rpc.tls import PodTls, TlsOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Durations in milliseconds, sizes in bytes."""

    keepalive_time_ms: int = 5_000
    keepalive_timeout_ms: int = 3_000
    max_message_bytes: int = 16 * 1024 * 1024
    describe_timeout_ms: int = 2_000

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


_DEFAULTS = LinkConfig()


@dataclass(frozen=True, kw_only=True)
class LinkOptions(TlsOptions):
    """What every program with a link can be told about it; the base of the services' configs."""

    max_message_bytes: int = option(_DEFAULTS.max_message_bytes, help="size limit of one frame, equal on both sides")
    keepalive_time_ms: int = option(
        _DEFAULTS.keepalive_time_ms, help="milliseconds between keepalive pings, equal on both sides"
    )
    keepalive_timeout_ms: int = option(
        _DEFAULTS.keepalive_timeout_ms, help="milliseconds until an unanswered ping ends the connection"
    )

    @property
    def link(self) -> LinkConfig:
        return LinkConfig(
            keepalive_time_ms=self.keepalive_time_ms,
            keepalive_timeout_ms=self.keepalive_timeout_ms,
            max_message_bytes=self.max_message_bytes,
        )

    def require_positive(self, *names: str) -> None:
        """Raises ConfigError naming the first of these options that is 0 or below."""
        for name in names:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0")

    def require_not_negative(self, *names: str) -> None:
        """Raises ConfigError naming the first of these options that is below 0."""
        for name in names:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative")


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
