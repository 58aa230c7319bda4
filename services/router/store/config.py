"""How the record of requests is kept: the numbers, each with its unit, once."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.errors import ConfigError
from moot.core.options import Options, option

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """The parts of `host:port`, IPv6 in brackets. Raises ConfigError naming the bad one."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--redis-sentinels: {text!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(Options):
    url: str | None = option(
        None, flag="redis_url", help="server of request records, redis://host:port/0 (none: memory only)"
    )
    """redis://, rediss:// or unix:// address of one Redis 7 or Valkey server. With `sentinels`, which know where it is,
    only user, password, database and TLS of it are used."""
    sentinels: tuple[str, ...] = option(
        (),
        flag="redis_sentinels",
        help="host:port of each sentinel that knows the server of records; they say its host and port",
    )
    sentinel_master: str = option(
        "", flag="redis_sentinel_master", help="name by which the sentinels know the server of records"
    )
    sentinel_username: str | None = option(
        None, flag="redis_sentinel_username", help="user of the sentinels themselves"
    )
    sentinel_password: str | None = option(
        None,
        flag="redis_sentinel_password",
        help="password of the sentinels themselves; they are spoken to by TLS if --redis-url is rediss://",
        repr=False,
    )
    mode: str = option(
        "degrade",
        flag="store_mode",
        help="without the server of records: degrade serves on, required refuses new requests",
        choices=("degrade", "required"),
    )
    prefix: str = option("moot", flag="store_prefix", help="first part of every key on the server of records")
    timeout_s: float = option(
        0.1, flag="store_timeout_s", help="seconds that one attempt on the server of records may take", above=0
    )
    """Of one attempt on the token path; there are at most two."""
    connect_timeout_s: float = 0.1
    lease_s: float = option(
        5.0,
        flag="store_lease_s",
        help="seconds of silence after which another router may take a request over",
        above=0,
    )
    """Measured by the server's clock."""
    ttl_s: float = 3600.0
    """Of a running request's keys, from its last commit."""
    finished_ttl_s: float = option(
        600.0,
        flag="store_finished_ttl_s",
        help="seconds that a finished request's record is kept, to be replayed",
        above=0,
    )
    upkeep_interval_s: float = 0.5
    """Between probes of a lost server, looks at its memory, repairs and renewals of leases."""
    memory_limit_ratio: float = 0.85
    """Used share of maxmemory from which new requests get no record."""
    max_batch_calls: int = 256
    max_batch_bytes: int = 1 << 20
    max_queued_calls: int = 4096
    """Waiting for the server at most; more are refused at once."""
    max_open_records: int = 65536
    """Requests held in memory for repair at most; more are served without a record."""

    def check_together(self) -> None:
        if bool(self.sentinels) != bool(self.sentinel_master):
            raise ConfigError("--redis-sentinels and --redis-sentinel-master go together")
        if self.sentinel_username is not None and self.sentinel_password is None:
            raise ConfigError("--redis-sentinel-username needs --redis-sentinel-password")
        if self.sentinel_password is not None and not self.sentinels:
            raise ConfigError("--redis-sentinel-password needs --redis-sentinels")
        for sentinel in self.sentinels:
            parse_address(sentinel)

    @property
    def keeps_records(self) -> bool:
        """Whether there is a server at all."""
        return self.url is not None or bool(self.sentinels)

    @property
    def server_url(self) -> str:
        """The server's address: of a server that the sentinels know, the rest of the address is the standard one."""
        return self.url or "redis://"

    @property
    def attempt_s(self) -> float:
        """Seconds of one attempt: asking the sentinels where there are any, connecting, sending and the replies."""
        return self.timeout_s + self.connect_timeout_s * (2 if self.sentinels else 1)

    @property
    def call_deadline_s(self) -> float:
        """Seconds of a call from queue to reply: one batch before it and its own, two attempts and two connects
        each."""
        return 4 * self.attempt_s

    @property
    def lease_ms(self) -> int:
        return round(self.lease_s * 1000)

    def ttl_ms(self, finished: bool) -> int:
        return round((self.finished_ttl_s if finished else self.ttl_s) * 1000)
