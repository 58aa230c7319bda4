"""Every metric of Moot, defined once. Base names follow vLLM's, so that people recognise them.

Speculation and token counters are moved by the router only; KV, batch and forward time by the verifier; drafting
time by the drafter. Label values come from closed sets.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from moot.core.errors import ConfigError
from moot.tally import Tally, TallyFamily

# Seconds. From half a millisecond: a round on a small model takes that little.
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10,
    30, 60,
)  # fmt: skip
# Seconds, of what the router itself takes: from 0.05 ms in steps of a fifth, since its median is what is looked at.
TURN_BUCKETS = tuple(round(0.00005 * 1.2**step, 7) for step in range(34))
COUNT_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metrics:
    """All metrics on one registry of their own, so that a test can hold several in one process. `service`: router,
    verifier or drafter, for `build_info`."""

    def __init__(self, service: str = "") -> None:
        self.registry = CollectorRegistry()
        self.num_requests_running = self._gauge("num_requests_running", "Requests being generated.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests accepted and not yet started.")
        self.kv_cache_usage_ratio = self._gauge("kv_cache_usage_ratio", "Used part of the KV cache, 0 to 1.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were started.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens delivered.")
        self.time_to_first_token_seconds = self._seconds(
            "time_to_first_token_seconds", "From the request's arrival to its first output token."
        )
        self.inter_token_latency_seconds = self._tally(
            "inter_token_latency_seconds",
            "Interval between deliveries over its tokens, counted once per token.",
            LATENCY_BUCKETS,
        )
        self.e2e_request_latency_seconds = self._seconds(
            "e2e_request_latency_seconds", "From the request's arrival to its end."
        )
        self.request_queue_time_seconds = self._seconds(
            "request_queue_time_seconds", "Waited before the verifier took the request."
        )
        self.requests = self._counter("requests", "Requests that ended.", "finish_reason")
        self.rounds = self._counter("rounds", "Rounds: propose, vote, verify, commit.")
        self.draft_tokens = self._counter("draft_tokens", "Draft tokens verified, every node of a tree counted.")
        self.accepted_tokens = self._counter("accepted_tokens", "Draft tokens accepted; the next token is not one.")
        self.accepted_tokens_per_position = self._counter(
            "accepted_tokens_per_position", "Draft tokens accepted at this depth of the draft.", "position"
        )
        self.proposal_tokens = self._counter("proposal_tokens", "Tokens a drafter proposed.", "drafter")
        self.proposals_accepted_tokens = self._counter(
            "proposals_accepted_tokens", "Leading tokens of a drafter's proposals that the target emitted.", "drafter"
        )
        self.votes_won = self._counter("votes_won", "Rounds whose draft followed this drafter.", "drafter")
        self.drafter_weight = self._gauge("drafter_weight", "A drafter's running weight in the vote.", "drafter")
        self.proposals_dropped = self._counter(
            "proposals_dropped", "Proposals that had no vote, and why.", "drafter", "reason"
        )
        self.asks_spared = self._counter("asks_spared", "Questions that dear drafters were spared by a sure cheap one.")
        self.drafters_left_out = self._gauge(
            "drafters_left_out", "1 while rounds ask this drafter only to try it, and why.", "drafter", "reason"
        )
        self.answers_dropped = self._counter(
            "answers_dropped", "Answers of peers that fitted no open wait, and why.", "role", "reason"
        )
        self.speculation_length = self._tally("speculation_length", "Tokens asked of the drafters.", COUNT_BUCKETS)
        self.speculation_length_changes = self._counter(
            "speculation_length_changes", "Rounds of a request that asked for another K than its round before."
        )
        self.vote_agreement_ratio = self._tally(
            "vote_agreement_ratio", "Share of the vote's weight behind the draft's first token.", RATIO_BUCKETS
        )
        self.round_duration_seconds = self._tallies(
            "round_duration_seconds", "Duration of a stage of a round.", LATENCY_BUCKETS, "stage"
        )
        self.round_turn_seconds = self._tallies(
            "round_turn_seconds",
            "From reading the last message that a round went on from until its command is written (stage: propose, "
            "verify).",
            TURN_BUCKETS,
            "stage",
        )
        self.pool_depth = self._gauge("pool_depth", "Drafts waiting to be verified.")
        self.verify_batch_size = self._histogram("verify_batch_size", "Requests in a forward pass.", COUNT_BUCKETS)
        self.verify_batch_tokens = self._histogram("verify_batch_tokens", "Tokens in a forward pass.", COUNT_BUCKETS)
        self.forward_seconds = self._seconds("forward_seconds", "Forward pass and sampling of one step.")
        self.draft_seconds = self._seconds("draft_seconds", "Drafting for one ask, from its first step to its answer.")
        self.draft_ahead_answers = self._counter(
            "draft_ahead_answers", "Proposals that were drafted before the ask came."
        )
        self.draft_ahead_tokens = self._counter("draft_ahead_tokens", "Tokens drafted while nobody asked for them.")
        self.draft_ahead_used_tokens = self._counter(
            "draft_ahead_used_tokens", "Tokens drafted ahead that were proposed later on, or committed as guessed."
        )
        self.draft_ahead_dropped_tokens = self._counter(
            "draft_ahead_dropped_tokens", "Tokens drafted ahead for a text that came otherwise, or had ended."
        )
        self.asks_dropped = self._counter("asks_dropped", "Asks a drafter did not draft for, and why.", "reason")
        self.prefix_cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.num_sessions = self._gauge("num_sessions", "Open sessions of a verifier or drafter.")
        self.degraded = self._gauge("degraded", "1 while this degraded mode is on.", "mode")
        self.peers = self._gauge("peers", "Peers by role and state.", "role", "state")
        self.request_moves = self._counter("request_moves", "Requests moved to another verifier, and why.", "reason")
        self.state_store_up = self._gauge("state_store_up", "1 while the store of request records answers.")
        self.build_info = self._gauge("build_info", "Always 1; the labels tell the build.", "version", "service")
        if service:
            self.build_info.labels(version("moot"), service).set(1)

    def add_vllm_names(self, model: str) -> None:
        """From now on three gauges are exposed a second time, as vLLM names and labels them."""
        self.registry.register(_VllmNames(self, model))

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"moot_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"moot_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"moot_{name}", text, labels, buckets=tuple(buckets), registry=self.registry)

    def _tally(self, name: str, text: str, buckets: Iterable[float]) -> Tally:
        """Of values that the event loop's thread alone observes."""
        return self._tallies(name, text, buckets).labels()

    def _tallies(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> TallyFamily:
        return TallyFamily(f"moot_{name}", text, tuple(buckets), labels, self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return self._histogram(name, text, LATENCY_BUCKETS, *labels)


class _VllmNames(Collector):
    """What an inference gateway reads of a model server, under the names that it knows from vLLM.

    Names: the Gateway API Inference Extension's model server protocol, column vLLM. `kv_cache_usage_perc` is a
    fraction from 0 to 1 in spite of its name. vLLM numbers the engines of one server; here there is one.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
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


class _QuietHandler(WSGIRequestHandler):
    timeout = 5.0  # seconds for a client to send its request

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


def _server_class(host: str) -> type[WSGIServer]:
    """For the family of `host`, an address or a name; a name that has both kinds of address means IPv4.

    Raises OSError when it has none.
    """
    addresses = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family for family, *_ in addresses}

    class Server(WSGIServer):
        address_family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6

    return Server


class Exposition(Protocol):
    def exposition(self) -> bytes:
        """Metrics in Prometheus's text format."""
        ...


class AdminServer:
    """GET /metrics, /livez, /readyz on a port of its own, in a thread of its own: it answers when the loop is stuck.

    `alive` and `ready` are called from that thread. `port` is the bound one when 0 was asked for. Raises ConfigError
    when the address cannot be bound.
    """

    def __init__(
        self,
        metrics: Exposition,
        *,
        host: str,
        port: int,
        alive: Callable[[], bool] = lambda: True,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        def app(environ: dict[str, str], start_response: Callable[..., object]) -> list[bytes]:
            path = environ.get("PATH_INFO", "")
            if path == "/metrics":
                start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
                return [metrics.exposition()]
            checks = {"/livez": alive, "/readyz": ready}
            if path not in checks:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"not found\n"]
            good = checks[path]()
            start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"ok\n" if good else b"no\n"]

        try:
            self._server: WSGIServer = make_server(host, port, app, _server_class(host), _QuietHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
