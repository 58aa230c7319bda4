"""Everything a router can be told, every bound and every wait. A default stands once: where the value acts, or here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from moot.config import option
from moot.core.errors import ConfigError
from moot.core.speculation.length import LENGTHS
from moot.core.speculation.panel import ALWAYS_ASK, PANELS, PAYING
from moot.core.voting.tree import SHAPES
from moot.core.voting.voting import POLICIES
from moot.core.voting.weights import WEIGHTS
from moot.drafters.registry import REQUEST_KINDS
from moot.rpc.link import LinkConfig, LinkOptions
from services.router.api.settings import HttpSettings
from services.router.generation.ballots import BallotPolicy
from services.router.generation.electorate import parse_priors
from services.router.peers.links import LinkPolicy
from services.router.peers.strikes import StrikePolicy
from services.router.peers.verifiers import TargetPolicy
from services.router.store.config import MODES, StoreConfig

_BALLOT, _STRIKES, _TARGET, _LINK_POLICY = BallotPolicy(), StrikePolicy(), TargetPolicy(), LinkPolicy()
_STORE, _HTTP = StoreConfig(url=""), HttpSettings(served_model_names=())

_MAY_BE_ZERO = frozenset(
    (
        *("port", "grpc_port", "metrics_port", "num_speculative_tokens", "max_draft_tokens", "num_top_candidates"),
        *("max_moves", "vote_soft_deadline_ms", "vote_quorum", "drafter_warm_up_s", "strike_memory_s", "retry_after_s"),
        *("shed_share",),
    )
)
"""Every other number of the config must be above 0."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig(LinkOptions):
    model: str = option(help="folder or hub id whose tokenizer and chat template are the target's")
    revision: str | None = option(None, help="pinned revision of a hub id")
    served_model_name: tuple[str, ...] = option(
        (), help="names of the model in the API (none: the last part of --model)"
    )
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(8000, help="HTTP port; 0 chooses a free one")
    grpc_port: int = option(8001, help="port of RouterService; 0 chooses a free one")
    metrics_port: int = option(8002, help="port of /metrics, /livez and /readyz; 0 chooses a free one")
    workers: int = option(
        1, help="processes that share the ports, one core's worth each; limits below are of one of them"
    )
    reuse_port: bool = option(False, help="let other processes listen on the same HTTP and gRPC port")
    ready_file: Path | None = option(None, help="written as JSON with the bound ports once requests are served")
    log_level: str = option("info", help="least level logged", choices=("debug", "info", "warning", "error"))

    verifiers: tuple[str, ...] = option(
        help="host:port of each verifier, or dns:///name:port, or k8s:///namespace/service:port"
    )
    drafters: tuple[str, ...] = option(
        (), help="id=host:port|host:port for each drafter and its replicas, or dns:/// or k8s:///"
    )
    in_process_drafters: tuple[str, ...] = option(
        (), help="drafters in this process: [id=]kind[:option=value]..., for instance suffix,prompt_lookup"
    )
    request_drafters: tuple[str, ...] = option(
        REQUEST_KINDS,
        help="those of prediction and sibling that vote where a request brings what they need: kind[:option=value]...",
    )
    discovery_interval_s: float = option(5.0, help="seconds between look-ups of DNS names")
    discovery_timeout_s: float = option(3.0, help="seconds that one look-up may take; after it the last list stays")

    vote: str = option("calibrated", help="how the drafters' proposals become one path", choices=tuple(POLICIES))
    shape: str = option("tree", help="what is verified of them", choices=tuple(SHAPES))
    weights: str = option("hedge", help="how a drafter's weight moves", choices=tuple(WEIGHTS))
    length: str = option("goodput", help="how K is chosen, the tokens asked of the drafters", choices=LENGTHS)
    cascade: float = option(
        ALWAYS_ASK,
        help="part of K that the best proposal of cheap drafters must be expected to bring for dear drafters not to be "
        "asked in a round; 1: they always are",
    )
    asks: str = option(
        PAYING, help="whom rounds ask: the drafters that bring more than waiting for them costs, or all", choices=PANELS
    )
    drafter_priors: tuple[str, ...] = option(
        (), help="id=number for drafters whose vote is to weigh more or less than 1 until they have earned their own"
    )
    num_speculative_tokens: int = option(8, help="greatest K; 0: no drafting at all")
    max_draft_tokens: int = option(16, help="tokens of one draft, all branches of a tree together")
    proposal_width: int = option(_BALLOT.width, help="proposals that one drafter may make for a round")
    num_top_candidates: int = option(
        _BALLOT.num_top_candidates, help="likely ids reported for drafters that live from them (recycling)"
    )

    vote_soft_deadline_ms: float = option(
        _BALLOT.soft_deadline_s * 1000, help="milliseconds after which a quorum of the drafters suffices"
    )
    vote_hard_deadline_ms: float = option(
        _BALLOT.hard_deadline_s * 1000, help="milliseconds after which a round goes on with what has come"
    )
    vote_quorum: float = option(_BALLOT.quorum, help="share of the drafters asked that suffices, 0 to 1")
    max_strikes: int = option(_STRIKES.max_strikes, help="late or malformed answers until a drafter is ejected")
    eject_s: float = option(
        _STRIKES.eject_s, help="seconds of the first ejection; the n-th in a row lasts n times as long"
    )
    drafter_warm_up_s: float = option(
        _STRIKES.warm_up_s, help="seconds in which a drafter may read a prompt before lateness counts"
    )
    strike_memory_s: float = option(
        _STRIKES.memory_s, help="seconds after which malformed answers and ejections are forgotten"
    )

    heartbeat_interval_s: float = option(_TARGET.heartbeat_interval_s, help="seconds between heartbeats to a verifier")
    max_missed_heartbeats: int = option(
        _TARGET.max_missed_heartbeats, help="missed or unprogressing heartbeats until a verifier is lost"
    )
    open_timeout_s: float = option(
        _TARGET.open_timeout_s, help="seconds for a verifier to read a prompt, its queue included"
    )
    verify_timeout_s: float = option(
        _TARGET.verify_timeout_s, help="seconds for a verifier to answer a draft, the pool included"
    )
    no_verifier_wait_s: float = option(
        _TARGET.no_verifier_wait_s, help="seconds a request waits while no verifier can take it; then 503"
    )
    capacity_retry_s: float = option(_TARGET.capacity_retry_s, help="seconds until a full verifier is asked again")
    max_moves: int = option(_TARGET.max_moves, help="lost verifiers that one request survives")
    max_kills: int = option(
        _TARGET.max_kills, help="lost verifiers that were computing a request until it is not tried again"
    )
    probation_wait_s: float = option(
        _TARGET.probation_wait_s, help="seconds such a request waits to be tried without other suspects"
    )

    backoff_min_s: float = option(
        _LINK_POLICY.backoff_min_s, help="seconds until a lost peer is connected to again, at first"
    )
    backoff_max_s: float = option(_LINK_POLICY.backoff_max_s, help="seconds until then at most")
    refused_retry_s: float = option(
        _LINK_POLICY.refused_retry_s,
        help="seconds until a peer with another tokenizer, model or certificate is asked again",
    )
    max_queued_commands: int = option(
        _LINK_POLICY.max_queued_commands, help="commands to one peer not yet sent; past it the stream is ended"
    )
    describe_timeout_ms: int = option(
        _LINK_POLICY.link.describe_timeout_ms, help="milliseconds to connect to a peer and hear what it is"
    )

    redis_url: str | None = option(None, help="server of request records, redis://host:port/0 (none: memory only)")
    redis_sentinels: tuple[str, ...] = option(
        (), help="host:port of each sentinel that knows that server; then its host and port are theirs to say"
    )
    redis_sentinel_master: str = option("", help="name by which they know it")
    redis_sentinel_username: str | None = option(None, help="user of the sentinels themselves")
    redis_sentinel_password: str | None = option(
        None, help="password of the sentinels themselves; TLS is theirs if --redis-url is rediss://"
    )
    store_mode: str = option(_STORE.mode, help="what an unreachable server of records means", choices=MODES)
    store_prefix: str = option(_STORE.prefix, help="first part of every key on it")
    store_timeout_s: float = option(_STORE.timeout_s, help="seconds that one attempt on it may take")
    store_lease_s: float = option(
        _STORE.lease_s, help="seconds of silence after which another router may take a request over"
    )
    store_finished_ttl_s: float = option(
        _STORE.finished_ttl_s, help="seconds that a finished request's record stays there, to be replayed"
    )

    api_key: tuple[str, ...] = option((), help="keys that callers must show (none, and no file: everybody may call)")
    api_keys_file: Path | None = option(None, help="file of sha256 hashes of further keys, one a line")
    max_body_bytes: int = option(_HTTP.max_body_bytes, help="size limit of a request body")
    max_choices_in_flight: int = option(
        _HTTP.max_choices_in_flight, help="choices generated at a time; one more is refused with 503"
    )
    max_choices_per_key: int = option(
        _HTTP.max_choices_per_key, help="choices of one API key at a time; one more is refused with 429"
    )
    max_queued_tokens: int = option(
        _HTTP.max_queued_tokens,
        help="prompt tokens and max_tokens of accepted choices that no verifier has begun; more are refused with 503",
    )
    max_queued_tokens_per_key: int = option(
        _HTTP.max_queued_tokens_per_key, help="such tokens of one API key; more are refused with 429"
    )
    shed_share: float = option(
        _HTTP.shed_share,
        help="part of the queue, of tokens or of the verifiers' waiting places, that may be taken until no round "
        "drafts any more, 0 to 1; 1: drafting goes on",
    )
    stream_buffer_bytes: int = option(
        _HTTP.stream_buffer_bytes,
        help="bytes of one answer that wait for a slow reader, in the router and again in the connection, until it "
        "pauses",
    )
    slow_client_timeout_s: float = option(
        _HTTP.slow_client_timeout_s,
        help="seconds in which a reader must make room in a full buffer; then it is cut off",
    )
    max_buffered_spans: int = option(64, help="rounds that a slow reader may lag behind before its request pauses")
    retry_after_s: float = option(
        _HTTP.retry_after_s, help="seconds that a refused caller is told to wait where nothing was measured yet"
    )
    drain_grace_s: float = option(20.0, help="seconds that running requests may finish in after SIGTERM")
    stall_limit_s: float = option(10.0, help="seconds without a turn of the event loop until /livez says no")

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work together."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                zero_is_good = field.name in _MAY_BE_ZERO
                # Written so that NaN, which is neither above nor below anything, is refused too.
                if not ((value > 0 or (zero_is_good and value == 0)) and math.isfinite(value)):
                    raise ConfigError(f"{field.name} must be {'0 or ' if zero_is_good else ''}above 0 and finite")
        if self.vote_soft_deadline_ms > self.vote_hard_deadline_ms:
            raise ConfigError("vote_soft_deadline_ms must not be above vote_hard_deadline_ms")
        for share in ("vote_quorum", "shed_share"):
            if not 0 <= getattr(self, share) <= 1:
                raise ConfigError(f"{share} must be 0 to 1")
        parse_priors(self.drafter_priors)
        if not self.verifiers:
            raise ConfigError("--verifiers must name at least one")

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model.rstrip("/").rsplit("/", 1)[-1],)

    @property
    def link(self) -> LinkConfig:
        return replace(super().link, describe_timeout_ms=self.describe_timeout_ms)

    @property
    def link_policy(self) -> LinkPolicy:
        return LinkPolicy(
            link=self.link,
            backoff_min_s=self.backoff_min_s,
            backoff_max_s=self.backoff_max_s,
            refused_retry_s=self.refused_retry_s,
            max_queued_commands=self.max_queued_commands,
        )

    @property
    def target_policy(self) -> TargetPolicy:
        return TargetPolicy(
            heartbeat_interval_s=self.heartbeat_interval_s,
            max_missed_heartbeats=self.max_missed_heartbeats,
            open_timeout_s=self.open_timeout_s,
            verify_timeout_s=self.verify_timeout_s,
            no_verifier_wait_s=self.no_verifier_wait_s,
            retry_after_s=self.retry_after_s,
            max_moves=self.max_moves,
            max_kills=self.max_kills,
            probation_wait_s=self.probation_wait_s,
            capacity_retry_s=self.capacity_retry_s,
        )

    @property
    def ballot_policy(self) -> BallotPolicy:
        return BallotPolicy(
            soft_deadline_s=self.vote_soft_deadline_ms / 1000,
            hard_deadline_s=self.vote_hard_deadline_ms / 1000,
            quorum=self.vote_quorum,
            width=self.proposal_width,
            num_top_candidates=self.num_top_candidates,
        )

    @property
    def strike_policy(self) -> StrikePolicy:
        return StrikePolicy(
            max_strikes=self.max_strikes,
            eject_s=self.eject_s,
            warm_up_s=self.drafter_warm_up_s,
            memory_s=self.strike_memory_s,
        )

    @property
    def store(self) -> StoreConfig | None:
        if self.redis_url is None and not (self.redis_sentinels or self.redis_sentinel_master):
            return None
        return StoreConfig(
            url=self.redis_url or "redis://",
            sentinels=self.redis_sentinels,
            sentinel_master=self.redis_sentinel_master,
            sentinel_username=self.redis_sentinel_username,
            sentinel_password=self.redis_sentinel_password,
            mode=self.store_mode,
            prefix=self.store_prefix,
            timeout_s=self.store_timeout_s,
            lease_s=self.store_lease_s,
            finished_ttl_s=self.store_finished_ttl_s,
        )

    @property
    def http(self) -> HttpSettings:
        return HttpSettings(
            served_model_names=self.served_model_names,
            max_body_bytes=self.max_body_bytes,
            max_choices_in_flight=self.max_choices_in_flight,
            max_choices_per_key=self.max_choices_per_key,
            max_queued_tokens=self.max_queued_tokens,
            max_queued_tokens_per_key=self.max_queued_tokens_per_key,
            shed_share=self.shed_share,
            retry_after_s=self.retry_after_s,
            stream_buffer_bytes=self.stream_buffer_bytes,
            slow_client_timeout_s=self.slow_client_timeout_s,
            # A choice's next chunk may need every wait that a request survives.
            chunk_timeout_s=(self.max_moves + 1) * (self.open_timeout_s + self.no_verifier_wait_s)
            + self.verify_timeout_s,
        )
