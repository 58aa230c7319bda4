"""The life of a router: what is made in which order, what is told when, and what is let go of at its end.

It also tells Python's cyclic garbage collector what a router's memory is like (`settle`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moot.core.errors import ConfigError, Draining, MootError, NoCapacity
from moot.core.speculation.policy import make_policy
from moot.core.types import ModelInfo
from moot.drafters.interface import DrafterEntry, parse_entries
from moot.drafters.registry import REQUEST_KINDS, create
from moot.rpc.grpc_server import GrpcServer, termination_event, write_ready_file
from moot.rpc.tls import PodTls, open_tls
from moot.runtime.admin import AdminServer
from moot.runtime.metrics import Metrics
from moot.runtime.tracing import open_tracing
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size
from moot.v1 import router_service_pb2_grpc
from services.router.api.admission import Admission
from services.router.api.auth import ApiKeys
from services.router.api.grpc import RouterServicer
from services.router.api.http.app import create_app
from services.router.api.http.http_server import serve_http
from services.router.config import RouterConfig
from services.router.generation.drafter_set import DrafterSet, parse_priors
from services.router.generation.request_types import Places
from services.router.generation.rounds import Rounds, ServedModel
from services.router.peers.discovery import follow, parse_drafters, parse_source
from services.router.peers.drafter_pools import DrafterPool
from services.router.peers.links import PeerLink, PeerState
from services.router.peers.local_drafters import LocalPool
from services.router.peers.targets import VerifierPool
from services.router.store import open_store

_log = logging.getLogger("moot.router")

THRESHOLDS = (20_000, 20, 20)
"""Objects more than were there at the last collection, until the youngest are looked at; and the same for the elder
two generations, in collections of the one before. Rounds free what they make by reference counts and leave no cycles,
so that Python's own 700 finds nothing, each few rounds, at a quarter of the router's time."""


def settle() -> None:
    """Take the objects that are there after the start (tokenizer, libraries) from the garbage collector: they stay
    until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


SERVICE = "moot.v1.RouterService"
"""The service that callers use, with API keys: it has no part in TLS between pods."""


class Peers:
    """The verifiers and drafters of one router, and what the two APIs and the gauges are told of them."""

    def __init__(self, config: RouterConfig, tokenizer: Any, metrics: Metrics, tls: PodTls | None = None) -> None:
        self._config = config
        self._tls = tls
        link_policy = replace(config.link_policy, tls=tls)
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._last_served = time.monotonic()
        self.draining = False
        fingerprint = tokenizer_fingerprint(tokenizer)
        self.targets = VerifierPool(
            link_policy,
            config.target_policy,
            fingerprint,
            metrics,
            self.on_state,
            lambda drafter: self.drafter_set.admit_attached(drafter.drafter_id, drafter.family),
        )
        policy = make_policy(config.speculation, priors=parse_priors(config.drafter_priors))
        self.drafter_set = DrafterSet(policy, config.collection_policy, metrics)
        self.pools = {
            drafter_id: DrafterPool(
                drafter_id,
                link_policy,
                config.ejection_policy,
                lambda: self.targets.fingerprint,
                metrics,
                self.on_state,
                policy.admit,
                round(config.collection_policy.hard_deadline_ms),
            )
            for drafter_id in parse_drafters(config.drafters)
        }
        vocab_size, sources = vocabulary_size(tokenizer), self.drafter_set.sources
        sources.update(self.pools)

        def hold(spec: DrafterEntry, *fingerprint: str) -> LocalPool:
            drafter = create(spec.kind, {"vocab_size": vocab_size, **spec.options}, *fingerprint)
            policy.admit(spec.drafter_id, drafter.family)
            sources[spec.drafter_id] = pool = LocalPool(spec.drafter_id, drafter, config.ejection_policy, metrics)
            return pool

        local = parse_entries(config.in_process_drafters, "--in-process-drafters")
        if twice := sorted(set(self.pools).intersection(spec.drafter_id for spec in local)):
            raise ConfigError(f"--drafters and --in-process-drafters both name {', '.join(twice)}: give one another id")
        self.local = [hold(spec, fingerprint) for spec in local]
        # Drafters that vote only where a request brings what they draft from. Their ids are their kinds.
        for spec in parse_entries(config.request_drafters, "--request-drafters"):
            if spec.kind not in REQUEST_KINDS or spec.drafter_id != spec.kind:
                raise ConfigError(f"--request-drafters: there is {' and '.join(REQUEST_KINDS)}, not {spec.drafter_id}")
            if spec.drafter_id in sources:
                raise ConfigError(f"--request-drafters: a drafter named {spec.drafter_id} is there: give it another id")
            hold(spec)
            # What one request's prediction was worth says nothing of the next one's.
            policy.selection.exempt.add(spec.drafter_id)

    def start(self) -> None:
        if self._tls is not None:
            self._tls.watch()
        config = self._config
        waits = (config.discovery_interval_s, config.discovery_timeout_s)
        sources = [(parse_source(config.verifiers, *waits), self.targets.set_addresses)]
        for drafter_id, addresses in parse_drafters(config.drafters).items():
            sources.append((parse_source(addresses, *waits), self.pools[drafter_id].set_addresses))
        self._tasks = [asyncio.create_task(follow(source, apply)) for source, apply in sources]
        for task in self._tasks:
            task.add_done_callback(_log_failure)
        self.on_state()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(pool.set_addresses([]) for pool in self.pools.values()), self.targets.close())
        if self._tls is not None:
            self._tls.close()

    def on_state(self) -> None:
        """Note that the state of a peer has changed."""
        if self.targets.is_available:
            self._last_served = time.monotonic()
        _count_states(self._metrics, "verifier", self.targets.all_links)
        _count_states(self._metrics, "drafter", [link for pool in self.pools.values() for link in pool.links.values()])
        available = [drafter_id for drafter_id, pool in self.pools.items() if pool.is_available]
        self.drafter_set.note_available(available)
        drafts = self.local or available or self.targets.drafts
        alone = self._config.speculation.num_speculative_tokens > 0 and not drafts
        self._metrics.degraded.labels("no_drafters").set(alone)
        self._metrics.degraded.labels("no_verifiers").set(not self.targets.is_available)
        if self.targets.info is not None:
            self._metrics.model_info.labels(self.targets.info.model).set(1)

    # What the fronts ask (settings.FrontState).

    def model_info(self) -> ModelInfo | None:
        return self.targets.info

    def drafter_ids(self) -> frozenset[str]:
        return self.drafter_set.drafter_ids

    def refusal(self) -> MootError | None:
        """Why new requests are refused: they wait for a verifier as long as one was there a moment ago, and are refused
        after that."""
        if self.draining:
            return Draining("this router is going away", self._config.limits.retry_after_s)
        if self.targets.is_available:
            self._last_served = time.monotonic()
        elif time.monotonic() - self._last_served > self._config.target_policy.no_verifier_wait_s:
            return NoCapacity("no verifier can be reached", self._config.limits.retry_after_s, "verifiers")
        return None

    def places(self) -> Places | None:
        return self.targets.places

    def shortage(self) -> MootError | None:
        """Why every verifier would refuse a new request now. Verifiers of several routers are full before each router
        knows it: a request that has been let in waits for a moment, and no other is let in meanwhile."""
        if self.targets.num_without_room:
            return NoCapacity("the verifiers are full", self._config.limits.retry_after_s, "places")
        return None


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log that a source has failed for good: it leaves the last list in place, and that must not go unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("discovery ended", exc_info=error)


def _count_states(metrics: Metrics, role: str, links: Iterable[PeerLink[Any]]) -> None:
    counts = Counter(link.state for link in links)
    for state in PeerState:
        metrics.peers.labels(role, state.value).set(counts[state])


class LoopWatch:
    """Whether the event loop still turns; asked from another thread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._turned_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._turn()

    def alive(self) -> bool:
        return time.monotonic() - self._turned_at < self._limit_s

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        self._turned_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / 4, self._turn)


async def serve(config: RouterConfig, terminated: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM; then readiness off, new requests refused, running ones finished, everything closed."""
    terminated = terminated or termination_event()
    metrics, tracing = Metrics("router"), open_tracing("router")
    service, http = config.service, config.http
    tls = open_tls(config.tls, "router", metrics)
    metrics.num_requests_limit.set(http.max_choices_in_flight)
    tokenizer = load_tokenizer(config.model, config.revision)
    keys = ApiKeys.from_keys(config.api_key)
    if config.api_keys_file is not None:
        keys = keys | ApiKeys.from_file(config.api_keys_file)
    peers = Peers(config, tokenizer, metrics, tls)

    def note_store(up: bool) -> None:
        metrics.state_store_up.set(up)
        metrics.degraded.labels("store").set(not up)

    store = await open_store(config.store, note_store)
    model = ServedModel(http.served_model_names[0], tokenizer_fingerprint(tokenizer))
    rounds = Rounds(peers.targets, peers.drafter_set, store, model, metrics, config.max_buffered_commits)
    watch = LoopWatch(config.stall_limit_s)
    app = create_app(
        rounds,
        tokenizer,
        http,
        state=peers,
        metrics=metrics,
        api_keys=keys,
        alive=watch.alive,
        tracing=tracing,
    )
    admission: Admission = app.state.front.admission
    peers.drafter_set.is_shedding = lambda: admission.is_shedding
    server = GrpcServer(config.link, (SERVICE,), config.reuse_port)
    router_service_pb2_grpc.add_RouterServiceServicer_to_server(RouterServicer(app.state.front, keys), server.server)
    admin = AdminServer(
        metrics.registry,
        service,
        alive=watch.alive,
        ready=lambda: not terminated.is_set() and peers.refusal() is None and peers.model_info() is not None,
    )
    drain = asyncio.create_task(_drain(terminated, peers, server))
    try:
        peers.start()
        await server.start(service.host, config.grpc_port)
        await server.set_serving(True)
        settle()
        await serve_http(
            app,
            service.host,
            config.port,
            stop=terminated,
            drain_timeout_s=service.drain_grace_s,
            reuse_port=config.reuse_port,
            on_ready=lambda port: write_ready_file(
                service.ready_file, port=port, grpc_port=server.port, metrics_port=admin.port
            ),
        )
    finally:
        # Not awaited for its own sake: a front that ended by itself has nobody to say that it is over.
        drain.cancel()
        await server.stop(grace_s=1.0)
        await peers.close()
        await store.close()
        await asyncio.to_thread(tracing.close)
        admin.close()
        watch.close()


async def _drain(terminated: asyncio.Event, peers: Peers, server: GrpcServer) -> None:
    """Drain both APIs. They share one admission, so that the HTTP API's drain waits for gRPC calls as well."""
    await terminated.wait()
    peers.draining = True
    await server.set_serving(False)
