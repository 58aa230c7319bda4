"""Fleet: which processes there are, how full they are, and what goes wrong between them."""

from __future__ import annotations

from panels import Dashboard, Panel, Row
from queries import (
    CORES,
    VARIABLES,
    chosen,
    increase,
    mean,
    model_rate,
    of_model,
    of_service,
    per_drafter,
    quantiles,
    rate,
    total,
)

_HITS = model_rate("moot_prefix_cache_hits_total")
_POOL = "~$pool"


def _seen(role: str) -> str:
    """Peers by state: routers may differ, so the mean of what they see."""
    return f"avg by (state) ({total(chosen('moot_peers', role=role), by='instance, worker, state')})"


def _by_instance(vector: str) -> str:
    return total(of_model(vector), by="instance")


_QUEUED = total(of_service("verifier", of_model(chosen("moot_num_requests_waiting"))), by="instance")
_FORWARD = quantiles("moot_forward_seconds", 0.5, 0.95, 0.99)

_PEERS = Row(
    "Who is there",
    [
        Panel("Verifiers", {_seen("verifier"): "{{state}}"}, "By state, as the routers see them on average."),
        Panel(
            "Drafters", {_seen("drafter"): "{{state}}"}, "Replicas of all pools, as the routers see them on average."
        ),
        Panel(
            "Degraded modes",
            {f"max by (mode) ({chosen('moot_degraded')})": "{{mode}}"},
            "1 while a router has no drafter, no verifier, or no store that answers, or sheds drafting.",
            maximum=1,
        ),
        Panel(
            "Processes by version",
            {f"count by (service, version) ({chosen('moot_build_info')})": "{{service}} {{version}}"},
            "Two versions of one service: a rollout is under way.",
        ),
        Panel(
            "Replicas of a pool",
            {f"count by (drafter, kind) ({chosen('moot_drafter_info', drafter=_POOL)})": "{{drafter}} ({{kind}})"},
            "Drafter processes that are scraped.",
        ),
        Panel(
            "Sessions of a pool",
            {total(per_drafter(chosen("moot_num_sessions")), by="drafter"): "{{drafter}}"},
            "Requests that its replicas hold.",
        ),
    ],
)
_VERIFIERS = Row(
    "Verifiers",
    [
        Panel(
            "KV cache in use",
            {_by_instance(chosen("moot_kv_cache_usage_ratio")): "{{instance}}"},
            "The prefix cache is not part of it.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Sessions",
            {_by_instance(chosen("moot_num_sessions")): "{{instance}}"},
            "Requests that a verifier holds, those that wait included.",
        ),
        Panel(
            "Requests without KV cache",
            {_QUEUED: "{{instance}}"},
            "They wait until others end.",
        ),
        Panel(
            "Requests in a forward pass",
            quantiles("moot_verify_batch_size", 0.5, 0.95) | {mean("moot_verify_batch_size"): "mean"},
            "The batch.",
        ),
        Panel(
            "Tokens in a forward pass",
            quantiles("moot_verify_batch_tokens", 0.5, 0.95) | {mean("moot_verify_batch_tokens"): "mean"},
            "Drafts and prompt chunks together.",
        ),
        Panel("Seconds of a forward pass", _FORWARD, "And its sampling.", "s"),
        Panel(
            "Drafts in the pool",
            {
                total(of_service("router", of_model(chosen("moot_pool_depth")))): "waiting (routers)",
                total(of_service("verifier", of_model(chosen("moot_pool_depth")))): "with work (verifiers)",
            },
            "Never above the batch: drafting pauses before.",
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            {f"{_HITS} / {model_rate('moot_prefix_cache_queries_total')}": "found"},
            "Of all that were looked up.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Steps per second",
            {_by_instance(rate("moot_forward_seconds_count")): "{{instance}}"},
            "Zero with sessions open: it stands still.",
        ),
    ],
)
_FAULTS = Row(
    "What goes wrong",
    [
        Panel(
            "Requests moved to another verifier",
            {total(of_model(increase("moot_request_moves_total")), by="reason"): "{{reason}}"},
            "lost: the verifier is gone. draining: it goes away in good order. Callers notice nothing.",
        ),
        Panel(
            "Heartbeats missed",
            {total(of_model(increase("moot_heartbeats_missed_total")), by="reason"): "{{reason}}"},
            "missed: none came. stuck: its compute thread stood still. Three in a row: lost.",
        ),
        Panel(
            "Drafters ejected",
            {total(of_model(increase("moot_drafter_ejections_total")), by="drafter"): "{{drafter}}"},
            "After three failures; they come back by themselves.",
        ),
        Panel(
            "Allocations that failed",
            {total(of_model(increase("moot_out_of_memory_total")), by="cost"): "{{cost}}"},
            "By what it cost. A request is given up only where nothing smaller helped.",
        ),
        Panel(
            "Readers cut off",
            {total(of_model(increase("moot_slow_clients_total")), by="api"): "{{api}}"},
            "They took too little of their answer for too long.",
        ),
        Panel(
            "Answers that fitted nothing",
            {total(of_model(rate("moot_answers_dropped_total")), by="role, reason"): "{{role}} {{reason}}"},
            "Of sessions that are over: a few after each move are right.",
        ),
        Panel(
            "Asks that drafters dropped",
            {total(per_drafter(rate("moot_asks_dropped_total")), by="drafter, reason"): "{{drafter}} {{reason}}"},
            "expired: nobody waited any more. superseded: the next one came first.",
        ),
    ],
)
_STORE = Row(
    "Store of request records",
    [
        Panel(
            "Store",
            {f"min({chosen('moot_state_store_up')})": "up"},
            "1 while it answers every router; 0 as well where there is none.",
            maximum=1,
        ),
        Panel(
            "Seconds of a commit",
            quantiles("moot_store_commit_seconds", 0.5, 0.95, 0.99),
            "Hidden behind the next round as long as it is shorter.",
            "s",
        ),
    ],
)
_PROCESSES = Row(
    "Processes",
    [
        Panel("Cores in use", {CORES: "{{instance}}"}, "A busy event loop or compute thread takes one."),
        Panel(
            "Memory",
            {total(chosen("moot_process_resident_memory_bytes"), by="instance"): "{{instance}}"},
            "Resident.",
            "bytes",
        ),
        Panel(
            "Open files",
            {total(chosen("moot_process_open_fds"), by="instance"): "{{instance}}"},
            "Connections included.",
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="moot-fleet",
    title="Moot / Fleet",
    text="Which processes there are, how full they are, and what goes wrong between them.",
    rows=[_PEERS, _VERIFIERS, _FAULTS, _STORE, _PROCESSES],
    variables=VARIABLES,
)
