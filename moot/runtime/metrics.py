"""Every metric of Moot, defined once. Base names follow vLLM's, so that people recognise them.

A process exposes the metrics that its service owns: speculation and token counters the router, KV, batch and forward
time the verifier, drafting time the drafter. Label values come from closed sets; a metric with a label whose values are
known beforehand shows all of them from the start, since the first increase of a series that was not there is lost.
`docs/metrics.md` is made of this module.

A `Definition` has the name, kind, text and labels of a metric, and the services that own it. A `Tally` is a histogram
that one thread moves: no lock, and one addition for many equal values. `VllmNames` exposes three gauges a second time,
under the names that inference gateways know from vLLM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from typing import Any, cast

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
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry | None
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(buckets)
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


@dataclass(slots=True)
class Definition:
    """The definition of one metric. `name`: as it stands in a query, `_total` included. `kind`: counter, gauge or
    histogram. `labels`: by name, the values that are shown from the start."""

    kind: str
    text: str
    labels: Mapping[str, Iterable[object]]
    owners: tuple[str, ...]
    make: Callable[..., Any]
    name: str = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = f"moot_{name}_total" if self.kind == "counter" else f"moot_{name}"

    def metric(self, registry: CollectorRegistry | None) -> Any:
        """The metric itself; None: exposed nowhere."""
        made = self.make(self.name, self.text, tuple(self.labels), registry=registry)
        for values in self.labels.values():
            for value in values:
                made.labels(str(value))
        return made


# Each takes the text, the names of labels, and labels whose values are known beforehand. What it gives is, as far as
# types go, the metric that an object of the class has there.


def _counter(text: str, *labels: str, by: tuple[str, ...] = (ROUTER,), **known: Iterable[object]) -> Counter:
    return cast(Counter, Definition("counter", text, dict.fromkeys(labels, ()) | known, by, Counter))


def _gauge(text: str, *labels: str, by: tuple[str, ...] = (ROUTER,), **known: Iterable[object]) -> Gauge:
    return cast(Gauge, Definition("gauge", text, dict.fromkeys(labels, ()) | known, by, Gauge))


def _histogram(text: str, buckets: Sequence[float], by: tuple[str, ...] = (ROUTER,)) -> Histogram:
    return cast(Histogram, Definition("histogram", text, {}, by, partial(Histogram, buckets=buckets)))


def _tallies(text: str, buckets: Sequence[float], *labels: str) -> TallyFamily:
    """Tallies of values that the event loop's thread alone observes."""
    make = partial(TallyFamily, buckets=buckets)
    return cast(TallyFamily, Definition("histogram", text, dict.fromkeys(labels, ()), (ROUTER,), make))


def _tally(text: str, buckets: Sequence[float]) -> Tally:
    def make(name: str, text: str, labels: Sequence[str], registry: CollectorRegistry | None) -> Tally:
        return TallyFamily(name, text, labels, buckets, registry).labels()

    return cast(Tally, Definition("histogram", text, {}, (ROUTER,), make))


class VllmNames(Collector):
    """The gauges that an inference gateway reads of a model server, under the names that it knows from vLLM.

    Names: the Gateway API Inference Extension's model server protocol, column vLLM. `kv_cache_usage_perc` is a
    fraction from 0 to 1 in spite of its name. vLLM numbers the engines of one server; here there is one.
    """

    def __init__(self, model: str, metrics: Metrics) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._gauges = {
            "vllm:num_requests_running": metrics.num_requests_running,
            "vllm:num_requests_waiting": metrics.num_requests_waiting,
            "vllm:kv_cache_usage_perc": metrics.kv_cache_usage_ratio,
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


class Metrics:
    """All metrics of one process, on a registry of their own, so that a test can hold several in one process.

    `service`: router, verifier or drafter; its own metrics are exposed, the others can be moved all the same. Without a
    service all are exposed.
    """

    # Requests.
    num_requests_running = _gauge(
        "Requests being generated; at a router all accepted requests that have not ended.", by=(ROUTER, VERIFIER)
    )
    num_requests_waiting = _gauge(
        "Requests that wait: at a router the running ones without a first token, at a verifier those without KV cache.",
        by=(ROUTER, VERIFIER),
    )
    num_requests_limit = _gauge(
        "Most requests that may run and wait at a time; one more is refused.", by=(ROUTER, VERIFIER)
    )
    prompt_tokens = _counter("Prompt tokens of requests that were started.")
    generation_tokens = _counter("Output tokens delivered.")
    time_to_first_token_seconds = _histogram(
        "Seconds from a request's arrival to its first output token.", LATENCY_BUCKETS
    )
    inter_token_latency_seconds = _tally(
        "Seconds between two deliveries, divided by the tokens of the second and counted once per token.",
        LATENCY_BUCKETS,
    )
    e2e_request_latency_seconds = _histogram("Seconds from a request's arrival to its end.", LATENCY_BUCKETS)
    requests = _counter("Requests that ended.", finish_reason=[reason.value for reason in FinishReason])
    requests_refused = _counter(
        "Requests answered with an error before anything was generated, by HTTP status (gRPC: the one like it).",
        code=REFUSAL_CODES,
    )
    requests_turned_away = _counter(
        "Requests refused for lack of room, by what was short; caller_...: room in the caller's own limit.",
        shortage=SHORTAGES,
    )
    queued_tokens = _gauge("Tokens of accepted requests without a first token: prompt and max_tokens.")
    queued_tokens_limit = _gauge("Most tokens that may be queued; requests beyond it are refused.")
    slow_clients = _counter("Connections and calls ended because their client read too slowly.", api=("http", "grpc"))

    # Speculation.
    rounds = _counter("Rounds completed: propose, vote, verify, commit.")
    draft_tokens = _counter("Draft tokens verified, every node of a tree counted.")
    accepted_tokens = _counter("Draft tokens accepted by the target; the next token of a round is not counted.")
    accepted_tokens_per_position = _counter("Draft tokens accepted, by their depth in the draft, from 0.", "position")
    plain_decoding_seconds = _counter(
        "Estimated seconds of plain decoding for the tokens of the rounds; over moot_round_duration_seconds_sum it is "
        "the speed-up."
    )
    proposal_tokens = _counter("Tokens that a drafter proposed.", "drafter")
    proposals_accepted_tokens = _counter("Leading tokens of a drafter's proposals that the target emitted.", "drafter")
    votes_won = _counter("Rounds in which this drafter proposed the whole voted path.", "drafter")
    drafter_weight = _gauge("Weight of a drafter with which the next request's votes start.", "drafter")
    proposals_dropped = _counter(
        "Proposals dropped before the vote, and why.", "drafter", "reason", by=(ROUTER, VERIFIER)
    )
    drafter_ejections = _counter(
        "Times that a replica of this drafter was ejected for a while after late or malformed answers.",
        "drafter",
    )
    drafters_left_out = _gauge(
        "1 while this drafter is left out: asked only now and then to try it; the reason says why.",
        "drafter",
        "reason",
    )
    drafter_calls_skipped = _counter("Drafter calls skipped because a cheap drafter was confident.")
    speculation_length = _tally("Tokens that each drafter is asked for in a round: K.", COUNT_BUCKETS)
    speculation_length_changes = _counter("Rounds whose K differs from that of the request's round before.")
    vote_agreement_ratio = _tally(
        "Part of the drafters that voted, 0 to 1, that is behind the draft's first token.", RATIO_BUCKETS
    )

    # Rounds and peers.
    round_duration_seconds = _tallies(
        "Seconds that a stage of a round takes (stage: draft, verify).", LATENCY_BUCKETS, "stage"
    )
    round_turn_seconds = _tallies(
        "Seconds of the router from reading what a round waited for to writing its next command (stage: propose, "
        "verify).",
        TURN_BUCKETS,
        "stage",
    )
    pool_depth = _gauge("Drafts waiting to be verified; at a verifier the sessions with work.", by=(ROUTER, VERIFIER))
    answers_dropped = _counter(
        "Answers of verifiers, and at a verifier commands of routers, that fit no open wait, and why.",
        "role",
        "reason",
        by=(ROUTER, VERIFIER),
    )
    degraded = _gauge(
        "1 while this degraded mode is on: the router runs without what the mode names.",
        mode=("no_drafters", "no_verifiers", "no_speculation"),
    )
    """Those of every router; one with a store has `store`, too."""
    peers = _gauge("Verifiers and drafter replicas known to this router, by role and state.", "role", "state")
    heartbeats_missed = _counter(
        "Heartbeats that a verifier did not answer (missed), or answered without progress (stuck).",
        reason=("missed", "stuck"),
    )
    request_moves = _counter("Requests moved to another verifier, and why.", reason=MOVE_REASONS)
    state_store_up = _gauge("1 while the store of request records answers; 0 also where there is none.")
    store_commit_seconds = _tally(
        "Seconds to write a round's committed tokens to the record, in the store or in memory.", LATENCY_BUCKETS
    )

    # Verifiers and drafters.
    kv_cache_usage_ratio = _gauge(
        "Part of the KV cache in use, 0 to 1; the prefix cache is not counted.", by=(VERIFIER,)
    )
    request_queue_time_seconds = _histogram(
        "Seconds from a request's arrival at the verifier to the start of the step that gave its first token.",
        LATENCY_BUCKETS,
        by=(VERIFIER,),
    )
    verify_batch_size = _histogram("Requests in one forward pass.", COUNT_BUCKETS, by=(VERIFIER,))
    verify_batch_tokens = _histogram("Tokens in one forward pass.", COUNT_BUCKETS, by=(VERIFIER,))
    forward_seconds = _histogram("Seconds of one step: forward pass and sampling.", LATENCY_BUCKETS, by=(VERIFIER,))
    prefix_cache_queries = _counter("Prompt tokens looked up in the prefix cache.", by=(VERIFIER,))
    prefix_cache_hits = _counter("Prompt tokens found in the prefix cache.", by=(VERIFIER,))
    out_of_memory = _counter(
        "Allocations that failed, by cost: a step repeated smaller, a draft or a request given up, blocks not "
        "shared (prefix), an attached drafter that abstained.",
        cost=OUT_OF_MEMORY,
        by=(VERIFIER,),
    )
    num_sessions = _gauge("Open sessions.", by=(VERIFIER, DRAFTER))
    draft_seconds = _histogram(
        "Seconds of drafting for one ask, from its first step to its answer; at a verifier: of its attached "
        "drafters after one step.",
        LATENCY_BUCKETS,
        by=(VERIFIER, DRAFTER),
    )
    draft_ahead_answers = _counter("Proposals that were drafted before the router asked for them.", by=(DRAFTER,))
    draft_ahead_tokens = _counter("Tokens drafted ahead, before the router asked for them.", by=(DRAFTER,))
    draft_ahead_used_tokens = _counter(
        "Tokens drafted ahead that were proposed later on, or committed as guessed.", by=(DRAFTER,)
    )
    draft_ahead_dropped_tokens = _counter(
        "Tokens drafted ahead in vain: the text went on differently, or had ended.", by=(DRAFTER,)
    )
    asks_dropped = _counter(
        "Asks of routers that a drafter did not draft for, and why.",
        reason=("capacity", "expired", "failed", "memory", "superseded"),
        by=(DRAFTER,),
    )

    # The process.
    build_info = _gauge("Always 1; the labels tell version and service.", "version", "service", by=SERVICES)
    model_info = _gauge("Always 1; the target model, as its verifier calls it.", "model", by=(ROUTER, VERIFIER))
    drafter_info = _gauge("Always 1; which drafter this process is a replica of.", "drafter", "kind", by=(DRAFTER,))
    certificate_expiry_timestamp_seconds = _gauge(
        "Unix time in seconds at which a certificate in use expires (certificate: own, ca).", "certificate", by=SERVICES
    )

    def __init__(self, service: str = "") -> None:
        self.registry = CollectorRegistry()
        self.definitions = list(_DECLARED.values())
        for name, one in _DECLARED.items():
            setattr(self, name, one.metric(self.registry if service in ("", *one.owners) else None))
        if service:
            self.build_info.labels(version("moot"), service).set(1)
            ProcessCollector(namespace="moot", registry=self.registry)

    def exposition(self) -> bytes:
        """The service's metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def add_vllm_names(self, model: str) -> None:
        """Expose three gauges a second time from now on, as vLLM names and labels them."""
        self.registry.register(VllmNames(model, self))


_DECLARED = {name: one for name, one in vars(Metrics).items() if isinstance(one, Definition)}
# Beside an attribute of the class, looking up the object's own takes twice as long.
for _name in _DECLARED:
    delattr(Metrics, _name)
