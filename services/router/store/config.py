"""How the record of requests is kept: the numbers, each with its unit, once."""

from __future__ import annotations

from dataclasses import dataclass, field

from moot.core.errors import ConfigError

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """`host:port`, IPv6 in brackets. Raises ConfigError naming the bad one."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--redis-sentinels: {text!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


MODES = ("degrade", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    url: str
    """redis://, rediss:// or unix:// address of one Redis 7 or Valkey server. With `sentinels`, who know where it is,
    only user, password, database and TLS of it are used."""
    sentinels: tuple[str, ...] = ()
    """host:port of each sentinel. They speak TLS if the server does, with the same certificates."""
    sentinel_master: str = ""
    """The name by which they know the server."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    """Of the sentinels themselves."""
    mode: str = "degrade"
    """What an unreachable server means: `degrade` serves without a record, `required` refuses new requests."""
    prefix: str = "moot"
    """First part of every key; the release name."""
    timeout_s: float = 0.1
    """Of one attempt on the token path; there are at most two."""
    connect_timeout_s: float = 0.1
    lease_s: float = 5.0
    """An owner silent for so long may be replaced; measured by the server's clock."""
    ttl_s: float = 3600.0
    """Of a running request's keys, from its last commit."""
    finished_ttl_s: float = 600.0
    """Of a finished request's keys: how long it can be replayed."""
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

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"store mode {self.mode!r} is not one of {', '.join(MODES)}")
        if bool(self.sentinels) != bool(self.sentinel_master):
            raise ConfigError("--redis-sentinels and --redis-sentinel-master go together")
        if self.sentinel_username is not None and self.sentinel_password is None:
            raise ConfigError("--redis-sentinel-username needs --redis-sentinel-password")
        if self.sentinel_password is not None and not self.sentinels:
            raise ConfigError("--redis-sentinel-password needs --redis-sentinels")
        for sentinel in self.sentinels:
            parse_address(sentinel)

    @property
    def attempt_s(self) -> float:
        """Of one attempt: asking the sentinels where there are any, connecting, sending and the replies."""
        return self.timeout_s + self.connect_timeout_s * (2 if self.sentinels else 1)

    @property
    def call_deadline_s(self) -> float:
        """Of a call from queue to reply: one batch before it and its own, two attempts and two connects each."""
        return 4 * self.attempt_s

    @property
    def lease_ms(self) -> int:
        return round(self.lease_s * 1000)

    def ttl_ms(self, finished: bool) -> int:
        return round((self.finished_ttl_s if finished else self.ttl_s) * 1000)
