"""Options of a service as a process. Imports no gRPC: commands know them too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moot.core.options import Options, option

MAX_QUEUED_COMMANDS = 8192
"""Of one stream, at either end."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(Options):
    """Options of every service as a process; `metrics_port` is another one in each."""

    host: str = option("127.0.0.1", help="address to listen on")
    metrics_port: int = option(help="port of /metrics, /livez and /readyz; 0 chooses a free one", minimum=0)
    ready_file: Path | None = option(None, help="file written as JSON with the bound ports once requests are served")
    log_level: str = option("info", help="lowest level that is logged", choices=("debug", "info", "warning", "error"))
    drain_grace_s: float = option(20.0, help="seconds after SIGTERM in which running requests may finish", minimum=0)


@dataclass(frozen=True, kw_only=True)
class PeerOptions(ServiceOptions):
    """Options of the services that routers hold streams to; `port` is another one in each."""

    port: int = option(help="gRPC port; 0 chooses a free one", minimum=0)
    max_queued_commands: int = option(
        MAX_QUEUED_COMMANDS,
        help="most commands of one stream that wait to be taken; with more the stream is ended",
        minimum=1,
    )
    max_queued_answers: int = option(
        8192, help="most answers of one stream that wait to be sent; with more the stream is ended", minimum=1
    )
    session_idle_limit_s: float = option(
        120.0, help="seconds without a command after which a session is freed", above=0
    )
    stall_limit_s: float = option(30.0, help="seconds without progress, with work queued, until /livez fails", above=0)
    stop_timeout_s: float = option(10.0, help="seconds to wait for the compute thread when stopping", above=0)
