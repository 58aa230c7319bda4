"""Every metric of Moot, defined once. Base names follow vLLM's, so that people recognise them.

A process exposes the metrics that its service owns: speculation and token counters the router, KV, batch and forward
time the verifier, drafting time the drafter. Label values come from closed sets; a metric with a label whose values are
known beforehand shows all of them from the start, since the first increase of a series that was not there is lost.
`docs/metrics.md` is made of this module.

A `Definition` has the name, kind, text and labels of a metric, and the services that own it; `Definitions` puts them on
a registry of one process. A `Tally` is a histogram that one thread moves: no lock, and one addition for many equal
values. `VllmNames` exposes three gauges a second time, under the names that inference gateways know from vLLM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from moot.core.errors import ERRORS
from moot.core.types import FinishReason


class Tally:
    """Counts of values by bucket. Only one thread may `observe`; any may read.

    The library's own histogram takes a lock for each of its numbers, which costs a round more than its vote's walk.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the buckets' upper bounds, included, rising."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Per bucket; the last is beyond all bounds."""
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` values of this size."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count


class TallyFamily(Collector):
    """Tallies of one metric, by the values of its labels. Without labels there is one, from the start.

    `registry`: where it is exposed, or None.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str], registry: CollectorRegistry | None
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(bounds)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Tally:
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labels) or 'none'}")
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally(self._bounds)
        return tally

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        for values, tally in list(self._tallies.items()):
            reached = map(float, accumulate(list(tally.counts)))
            family.add_metric(values, list(zip(names, reached, strict=True)), sum_value=tally.total)
        yield family


ROUTER, VERIFIER, DRAFTER = SERVICES = ("router", "verifier", "drafter")


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of one metric. `name`: as it stands in a query, `_total` included. `kind`: counter, gauge or
    histogram."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    owners: tuple[str, ...]


class Definitions:
    """Defines metrics, and exposes those that `service` owns; without a service all of them."""

    def __init__(self, service: str = "") -> None:
        self.registry = CollectorRegistry()
        self.definitions: list[Definition] = []
        self._service = service

    def exposition(self) -> bytes:
        """The service's metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str, by: tuple[str, ...] = (ROUTER,)) -> Counter:
        registry = self._registry_for(f"{name}_total", "counter", text, labels, by)
        return Counter(f"moot_{name}", text, labels, registry=registry)

    def _gauge(self, name: str, text: str, *labels: str, by: tuple[str, ...] = (ROUTER,)) -> Gauge:
        return Gauge(f"moot_{name}", text, labels, registry=self._registry_for(name, "gauge", text, labels, by))

    def _histogram(self, name: str, text: str, buckets: Iterable[float], by: tuple[str, ...] = (ROUTER,)) -> Histogram:
        registry = self._registry_for(name, "histogram", text, (), by)
        return Histogram(f"moot_{name}", text, (), buckets=tuple(buckets), registry=registry)

    def _tally(self, name: str, text: str, buckets: Iterable[float]) -> Tally:
        """A tally of values that the event loop's thread alone observes."""
        return self._tallies(name, text, buckets).labels()

    def _tallies(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> TallyFamily:
        registry = self._registry_for(name, "histogram", text, labels, (ROUTER,))
        return TallyFamily(f"moot_{name}", text, tuple(buckets), labels, registry)

    def _registry_for(
        self, name: str, kind: str, text: str, labels: tuple[str, ...], owners: tuple[str, ...]
    ) -> CollectorRegistry | None:
        self.definitions.append(Definition(f"moot_{name}", kind, text, labels, owners))
        return self.registry if self._service in ("", *owners) else None


class VllmNames(Collector):
    """The gauges that an inference gateway reads of a model server, under the names that it knows from vLLM.

    Names: the Gateway API Inference Extension's model server protocol, column vLLM. `kv_cache_usage_perc` is a
    fraction from 0 to 1 in spite of its name. vLLM numbers the engines of one server; here there is one.
    """

    def __init__(self, model: str, *, running: Gauge, waiting: Gauge, kv_cache_usage: Gauge) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._gauges = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": waiting,
            "vllm:kv_cache_usage_perc": kv_cache_usage,
        }

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, gauge in self._gauges.items():
            for mirrored in gauge.collect():
                family = GaugeMetricFamily(name, mirrored.documentation, labels=tuple(self._labels))
                for sample in mirrored.samples:
                    family.add_metric(tuple(self._labels.values()), sample.value)
                yield family


# A second series for every counter, which nobody asks for. (The function has no annotations.)
disable_created_metrics()  # type: ignore[no-untyped-call]

# Seconds. From half a millisecond: a round on a small model takes that little.
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10,
    30, 60,
)  # fmt: skip
# Seconds, of what the router itself takes: from 0.05 ms in steps of a fifth, since its median is what is looked at.
TURN_BUCKETS = tuple(round(0.00005 * 1.2**step, 7) for step in range(34))
COUNT_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

REFUSAL_CODES = (400, 401, 404, 413, 429, 500, 503, 504)
"""Statuses with which the router answers instead of generating."""
MOVE_REASONS = (*dict.fromkeys(row.moves for row in ERRORS.values() if row.moves), "other_numerics")
SHORTAGES = (
    *("caller_choices", "caller_tokens", "choices", "tokens", "places", "verifiers", "memory", "draining", "other"),
)
"""What was short when a request was refused: room in the caller's own limits (429), or in the server's."""
OUT_OF_MEMORY = ("step", "draft", "request", "prefix", "drafter")
"""What a failed allocation has cost a verifier."""
APIS = ("http", "grpc")
DEGRADED_MODES = ("no_drafters", "no_verifiers", "no_speculation")
"""The degraded modes of every router; one with a store has `store`, too."""


class Metrics(Definitions):
    """All metrics of one process, on a registry of their own, so that a test can hold several in one process.

    `service`: router, verifier or drafter; its own metrics are exposed, the others can be moved all the same. Without a
    service all are exposed.
    """

    def __init__(self, service: str = "") -> None:
        super().__init__(service)
        self._define_requests()
        self._define_speculation()
        self._define_rounds_and_peers()
        self._define_verifiers_and_drafters()
        self._define_process()

    def _define_requests(self) -> None:
        self.num_requests_running = self._gauge(
            "num_requests_running",
            "Requests being generated; at a router all accepted requests that have not ended.",
            by=(ROUTER, VERIFIER),
        )
        self.num_requests_waiting = self._gauge(
            "num_requests_waiting",
            "Requests that wait: at a router the running ones without a first token, at a verifier those without KV "
            "cache.",
            by=(ROUTER, VERIFIER),
        )
        self.num_requests_limit = self._gauge(
            "num_requests_limit",
            "Most requests that may run and wait at a time; one more is refused.",
            by=(ROUTER, VERIFIER),
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were started.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens delivered.")
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first output token.",
            LATENCY_BUCKETS,
        )
        self.inter_token_latency_seconds = self._tally(
            "inter_token_latency_seconds",
            "Seconds between two deliveries, divided by the tokens of the second and counted once per token.",
            LATENCY_BUCKETS,
        )
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", LATENCY_BUCKETS
        )
        self.requests = self._counter("requests", "Requests that ended.", "finish_reason")
        for reason in FinishReason:
            self.requests.labels(reason.value)
        self.requests_refused = self._counter(
            "requests_refused",
            "Requests answered with an error before anything was generated, by HTTP status (gRPC: the one like it).",
            "code",
        )
        for code in REFUSAL_CODES:
            self.requests_refused.labels(str(code))
        self.requests_turned_away = self._counter(
            "requests_turned_away",
            "Requests refused for lack of room, by what was short; caller_...: room in the caller's own limit.",
            "shortage",
        )
        for shortage in SHORTAGES:
            self.requests_turned_away.labels(shortage)
        self.queued_tokens = self._gauge(
            "queued_tokens", "Tokens of accepted requests without a first token: prompt and max_tokens."
        )
        self.queued_tokens_limit = self._gauge(
            "queued_tokens_limit", "Most tokens that may be queued; requests beyond it are refused."
        )
        self.slow_clients = self._counter(
            "slow_clients", "Connections and calls ended because their client read too slowly.", "api"
        )
        for api in APIS:
            self.slow_clients.labels(api)

    def _define_speculation(self) -> None:
        self.rounds = self._counter("rounds", "Rounds completed: propose, vote, verify, commit.")
        self.draft_tokens = self._counter("draft_tokens", "Draft tokens verified, every node of a tree counted.")
        self.accepted_tokens = self._counter(
            "accepted_tokens", "Draft tokens accepted by the target; the next token of a round is not counted."
        )
        self.accepted_tokens_per_position = self._counter(
            "accepted_tokens_per_position", "Draft tokens accepted, by their depth in the draft, from 0.", "position"
        )
        self.plain_decoding_seconds = self._counter(
            "plain_decoding_seconds",
            "Estimated seconds of plain decoding for the tokens of the rounds; over moot_round_duration_seconds_sum it "
            "is the speed-up.",
        )
        self.proposal_tokens = self._counter("proposal_tokens", "Tokens that a drafter proposed.", "drafter")
        self.proposals_accepted_tokens = self._counter(
            "proposals_accepted_tokens", "Leading tokens of a drafter's proposals that the target emitted.", "drafter"
        )
        self.votes_won = self._counter(
            "votes_won", "Rounds in which this drafter proposed the whole voted path.", "drafter"
        )
        self.drafter_weight = self._gauge(
            "drafter_weight", "Weight of a drafter with which the next request's votes start.", "drafter"
        )
        self.proposals_dropped = self._counter(
            "proposals_dropped",
            "Proposals dropped before the vote, and why.",
            "drafter",
            "reason",
            by=(ROUTER, VERIFIER),
        )
        self.drafter_ejections = self._counter(
            "drafter_ejections",
            "Times that a replica of this drafter was ejected for a while after late or malformed answers.",
            "drafter",
        )
        self.drafters_left_out = self._gauge(
            "drafters_left_out",
            "1 while this drafter is left out: asked only now and then to try it; the reason says why.",
            "drafter",
            "reason",
        )
        self.drafter_calls_skipped = self._counter(
            "drafter_calls_skipped", "Drafter calls skipped because a cheap drafter was confident."
        )
        self.speculation_length = self._tally(
            "speculation_length", "Tokens that each drafter is asked for in a round: K.", COUNT_BUCKETS
        )
        self.speculation_length_changes = self._counter(
            "speculation_length_changes", "Rounds whose K differs from that of the request's round before."
        )
        self.vote_agreement_ratio = self._tally(
            "vote_agreement_ratio",
            "Part of the drafters that voted, 0 to 1, that is behind the draft's first token.",
            RATIO_BUCKETS,
        )

    def _define_rounds_and_peers(self) -> None:
        self.round_duration_seconds = self._tallies(
            "round_duration_seconds",
            "Seconds that a stage of a round takes (stage: draft, verify).",
            LATENCY_BUCKETS,
            "stage",
        )
        self.round_turn_seconds = self._tallies(
            "round_turn_seconds",
            "Seconds of the router from reading what a round waited for to writing its next command (stage: propose, "
            "verify).",
            TURN_BUCKETS,
            "stage",
        )
        self.pool_depth = self._gauge(
            "pool_depth",
            "Drafts waiting to be verified; at a verifier the sessions with work.",
            by=(ROUTER, VERIFIER),
        )
        self.answers_dropped = self._counter(
            "answers_dropped",
            "Answers of verifiers, and at a verifier commands of routers, that fit no open wait, and why.",
            "role",
            "reason",
            by=(ROUTER, VERIFIER),
        )
        self.degraded = self._gauge(
            "degraded", "1 while this degraded mode is on: the router runs without what the mode names.", "mode"
        )
        for mode in DEGRADED_MODES:
            self.degraded.labels(mode)
        self.peers = self._gauge(
            "peers", "Verifiers and drafter replicas known to this router, by role and state.", "role", "state"
        )
        self.heartbeats_missed = self._counter(
            "heartbeats_missed",
            "Heartbeats that a verifier did not answer (missed), or answered without progress (stuck).",
            "reason",
        )
        for reason in ("missed", "stuck"):
            self.heartbeats_missed.labels(reason)
        self.request_moves = self._counter("request_moves", "Requests moved to another verifier, and why.", "reason")
        for reason in MOVE_REASONS:
            self.request_moves.labels(reason)
        self.state_store_up = self._gauge(
            "state_store_up",
            "1 while the store of request records answers; 0 also where there is none.",
        )
        self.store_commit_seconds = self._tally(
            "store_commit_seconds",
            "Seconds to write a round's committed tokens to the record, in the store or in memory.",
            LATENCY_BUCKETS,
        )

    def _define_verifiers_and_drafters(self) -> None:
        own, drafts = (VERIFIER,), (DRAFTER,)
        self.kv_cache_usage_ratio = self._gauge(
            "kv_cache_usage_ratio", "Part of the KV cache in use, 0 to 1; the prefix cache is not counted.", by=own
        )
        self.request_queue_time_seconds = self._histogram(
            "request_queue_time_seconds",
            "Seconds from a request's arrival at the verifier to the start of the step that gave its first token.",
            LATENCY_BUCKETS,
            by=own,
        )
        self.verify_batch_size = self._histogram(
            "verify_batch_size", "Requests in one forward pass.", COUNT_BUCKETS, by=own
        )
        self.verify_batch_tokens = self._histogram(
            "verify_batch_tokens", "Tokens in one forward pass.", COUNT_BUCKETS, by=own
        )
        self.forward_seconds = self._histogram(
            "forward_seconds", "Seconds of one step: forward pass and sampling.", LATENCY_BUCKETS, by=own
        )
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", by=own
        )
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", by=own)
        self.out_of_memory = self._counter(
            "out_of_memory",
            "Allocations that failed, by cost: a step repeated smaller, a draft or a request given up, blocks not "
            "shared (prefix), an attached drafter that abstained.",
            "cost",
            by=own,
        )
        for cost in OUT_OF_MEMORY:
            self.out_of_memory.labels(cost)
        self.num_sessions = self._gauge("num_sessions", "Open sessions.", by=(VERIFIER, DRAFTER))
        self.draft_seconds = self._histogram(
            "draft_seconds",
            "Seconds of drafting for one ask, from its first step to its answer; at a verifier: of its attached "
            "drafters after one step.",
            LATENCY_BUCKETS,
            by=(VERIFIER, DRAFTER),
        )
        self.draft_ahead_answers = self._counter(
            "draft_ahead_answers", "Proposals that were drafted before the router asked for them.", by=drafts
        )
        self.draft_ahead_tokens = self._counter(
            "draft_ahead_tokens", "Tokens drafted ahead, before the router asked for them.", by=drafts
        )
        self.draft_ahead_used_tokens = self._counter(
            "draft_ahead_used_tokens",
            "Tokens drafted ahead that were proposed later on, or committed as guessed.",
            by=drafts,
        )
        self.draft_ahead_dropped_tokens = self._counter(
            "draft_ahead_dropped_tokens",
            "Tokens drafted ahead in vain: the text went on differently, or had ended.",
            by=drafts,
        )
        self.asks_dropped = self._counter(
            "asks_dropped", "Asks of routers that a drafter did not draft for, and why.", "reason", by=drafts
        )
        for reason in ("capacity", "expired", "failed", "memory", "superseded"):
            self.asks_dropped.labels(reason)

    def _define_process(self) -> None:
        self.build_info = self._gauge(
            "build_info", "Always 1; the labels tell version and service.", "version", "service", by=SERVICES
        )
        self.model_info = self._gauge(
            "model_info", "Always 1; the target model, as its verifier calls it.", "model", by=(ROUTER, VERIFIER)
        )
        self.drafter_info = self._gauge(
            "drafter_info", "Always 1; which drafter this process is a replica of.", "drafter", "kind", by=(DRAFTER,)
        )
        self.certificate_expiry_timestamp_seconds = self._gauge(
            "certificate_expiry_timestamp_seconds",
            "Unix time in seconds at which a certificate in use expires (certificate: own, ca).",
            "certificate",
            by=SERVICES,
        )
        if self._service:
            self.build_info.labels(version("moot"), self._service).set(1)
            ProcessCollector(namespace="moot", registry=self.registry)

    def add_vllm_names(self, model: str) -> None:
        """Expose three gauges a second time from now on, as vLLM names and labels them."""
        self.registry.register(
            VllmNames(
                model,
                running=self.num_requests_running,
                waiting=self.num_requests_waiting,
                kv_cache_usage=self.kv_cache_usage_ratio,
            )
        )
