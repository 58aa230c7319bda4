"""Overview: traffic, latency, errors, saturation, and what a token costs."""

from __future__ import annotations

from panels import Dashboard, Panel, Row, stat, text_variable
from queries import (
    CORES,
    GAIN,
    VARIABLES,
    chosen,
    mean,
    model_rate,
    of_model,
    of_service,
    quantile,
    quantiles,
    total,
)

_TTFT, _ITL = "moot_time_to_first_token_seconds", "moot_inter_token_latency_seconds"
_TOKENS = model_rate("moot_generation_tokens_total")
_REFUSED = model_rate("moot_requests_refused_total", code="~5..")
_ERRORS = f"({model_rate('moot_requests_total', finish_reason='error')} + {_REFUSED})"
_ERROR_RATIO = f"{_ERRORS} / ({model_rate('moot_requests_total')} + {_REFUSED})"
_VERIFIERS = f"count({of_model(chosen('moot_build_info', service='verifier'))})"
_DRAFTERS = f"(count({chosen('moot_build_info', service='drafter')}) or vector(0))"
_PRICE = f"({_VERIFIERS} * $verifier_price + {_DRAFTERS} * $drafter_price)"
_COST = f"1e6 * {_PRICE} / (3600 * {_TOKENS})"
_RUNNING = of_service("router", of_model(chosen("moot_num_requests_running")))
_WAITING = of_service("router", of_model(chosen("moot_num_requests_waiting")))
_QUEUED = of_service("verifier", of_model(chosen("moot_num_requests_waiting")))

_NOW = Row(
    "Now",
    [
        stat("Requests", model_rate("moot_requests_total"), "That ended, per second.", "reqps", 3),
        stat("Tokens", _TOKENS, "Output tokens delivered, per second.", width=3),
        stat(
            "Errors",
            _ERROR_RATIO,
            "Requests that ended in an error or were refused with 5xx, of all. The objective is below 0.1 %.",
            "percentunit",
            3,
            0.001,
        ),
        stat("First token, p95", quantile(0.95, _TTFT), "From the request's arrival.", "s", 3, 2.5),
        stat(
            "Next token, p95",
            quantile(0.95, _ITL),
            "Interval between deliveries over its tokens.",
            "s",
            3,
            threshold=0.1,
        ),
        stat(
            "Gain",
            GAIN,
            "Times faster than plain decoding, estimated: 1 is no gain. See the dashboard Speculation.",
            width=3,
        ),
        stat("Verifiers", _VERIFIERS, "That are scraped.", width=3),
        stat(
            "Cost of a million tokens",
            _COST,
            "At the prices of a pod and hour that are set above, at the present speed.",
            width=3,
        ),
    ],
    height=4,
)
_TRAFFIC = Row(
    "Traffic and errors",
    [
        Panel(
            "Requests by how they ended",
            {model_rate("moot_requests_total", by="finish_reason"): "{{finish_reason}}"},
            "abort: the caller went away. error: it failed.",
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests refused",
            {model_rate("moot_requests_refused_total", by="code"): "{{code}}"},
            "429: the caller is over its limit. 503: no capacity, draining, no verifier, no store. Else: malformed.",
            "reqps",
            stacked=True,
        ),
        Panel(
            "Tokens",
            {_TOKENS: "output", model_rate("moot_prompt_tokens_total"): "prompt"},
            "Output tokens that were delivered, and prompt tokens of the requests that were started.",
            "short",
        ),
    ],
)
_LATENCY = Row(
    "Latency",
    [
        Panel("First token", quantiles(_TTFT, 0.5, 0.95, 0.99), "From the request's arrival.", "s", width=6),
        Panel("Next token", quantiles(_ITL, 0.5, 0.95, 0.99), "Each interval over its tokens.", "s", width=6),
        Panel(
            "Whole request",
            quantiles("moot_e2e_request_latency_seconds", 0.5, 0.95, 0.99),
            "From arrival to end: depends on how long the answers are.",
            "s",
            width=6,
        ),
        Panel(
            "Queue of the verifier",
            quantiles("moot_request_queue_time_seconds", 0.5, 0.95, 0.99),
            "Until a verifier took the request's prompt. Grows before anything else does.",
            "s",
            width=6,
        ),
    ],
)
_SATURATION = Row(
    "Saturation",
    [
        Panel(
            "Requests in flight",
            {total(_RUNNING): "accepted", total(_WAITING): "without a first token", total(_QUEUED): "without KV cache"},
            "Of the routers; of the verifiers those that wait for KV cache.",
        ),
        Panel(
            "Turned away for want of room",
            {model_rate("moot_requests_turned_away_total", by="shortage"): "{{shortage}}"},
            "Of the refused requests, by what was short; caller_...: of the caller's own share. Drafting stops before.",
            "reqps",
            stacked=True,
        ),
        Panel(
            "KV cache in use",
            {f"max by (instance) ({of_model(chosen('moot_kv_cache_usage_ratio'))})": "{{instance}}"},
            "Of each verifier.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Cores in use",
            {CORES: "{{instance}}"},
            "By process; a router's event loop is full at one.",
        ),
    ],
)
_COSTS = Row(
    "Cost",
    [
        Panel("Cost of a million output tokens", {_COST: "cost"}, "Prices per pod and hour are variables.", width=8),
        Panel(
            "Verifier seconds for a thousand tokens",
            {f"1000 * {model_rate('moot_forward_seconds_sum')} / {_TOKENS}": "seconds"},
            "Compute time of forward passes, prefill included: what drafting and batching lower.",
            "s",
            width=8,
        ),
        Panel(
            "Tokens in a forward pass",
            {mean("moot_verify_batch_tokens"): "tokens", mean("moot_verify_batch_size"): "requests"},
            "Means. A step costs about the same while it reads more memory than it computes.",
            width=8,
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="moot-overview",
    title="Moot / Overview",
    text="Traffic, latency, errors, saturation, and what a token costs.",
    rows=[_NOW, _TRAFFIC, _LATENCY, _SATURATION, _COSTS],
    variables=[
        *VARIABLES,
        text_variable("verifier_price", "Verifier pod, per hour", "2.5"),
        text_variable("drafter_price", "Drafter pod, per hour", "0.5"),
    ],
)
