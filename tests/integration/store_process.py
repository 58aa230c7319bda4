"""The record server of a test."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moot.commands import embedded_store
from moot.runtime.supervisor import Child, Supervisor
from tests.integration.processes import START_TIMEOUT_S
from tests.waiting import GIVE_UP_S


@dataclass(slots=True)
class Store:
    """The record server, on a Unix socket. Its data survive a restart."""

    supervisor: Supervisor
    folder: Path
    child: Child
    is_frozen: bool = False

    @property
    def url(self) -> str:
        return embedded_store.store_url(self.folder)

    def kill(self) -> None:
        self.child.process.send_signal(signal.SIGKILL)
        self.child.process.wait(GIVE_UP_S)

    def freeze(self) -> None:
        self.child.process.send_signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        if self.child.status is None:
            self.child.process.send_signal(signal.SIGCONT)
        self.is_frozen = False

    def restart(self) -> None:
        self.child = spawn_store(self.supervisor, self.folder)
        self.supervisor.wait_ready([self.child], START_TIMEOUT_S)

    def client(self) -> Any:
        """A plain client of redis-py, for looking and for breaking."""
        import redis

        return redis.Redis.from_url(self.url, socket_timeout=GIVE_UP_S)


def spawn_store(supervisor: Supervisor, folder: Path) -> Child:
    (folder / embedded_store.SOCKET_NAME).unlink(missing_ok=True)
    return supervisor.spawn(
        "store", embedded_store.store_argv(folder), essential=False, look=lambda: embedded_store.is_ready(folder)
    )
