"""What each process exposes: its own metrics, all of them described, and moved by the code that owns them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moot.runtime.metrics import SERVICES, Metrics

ROOT = Path(__file__).parents[2]

BY_NAMES_MD = {
    "router": [
        *("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("requests_total", "rounds_total", "draft_tokens_total", "accepted_tokens_total"),
        *("accepted_tokens_per_position_total", "proposal_tokens_total", "proposals_accepted_tokens_total"),
        *("votes_won_total", "drafter_weight", "proposals_dropped_total", "speculation_length"),
        *("vote_agreement_ratio", "round_duration_seconds", "pool_depth", "degraded", "peers", "state_store_up"),
        "build_info",
    ],
    "verifier": [
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "request_queue_time_seconds"),
        *("verify_batch_size", "verify_batch_tokens", "forward_seconds", "build_info"),
    ],
    "drafter": ["draft_seconds", "build_info"],
}
"""Metrics that people rely on by name: renaming one breaks their dashboards."""


def exposed(service: str) -> dict[str, str]:
    """Family to type, without those of the process; a counter's family has no `_total`."""
    families = text_string_to_metric_families(Metrics(service).exposition().decode())
    return {one.name: one.type for one in families if not one.name.startswith("moot_process_")}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_exposes_what_it_owns_and_nothing_else(service: str) -> None:
    """A sum over all processes counts nothing twice, and shows no zeros of processes that never count."""
    own = {one.name.removesuffix("_total"): one.kind for one in Metrics().definitions if service in one.owners}
    assert exposed(service) == own
    assert {f"moot_{name}".removesuffix("_total") for name in BY_NAMES_MD[service]} <= own.keys()


def test_speculation_and_tokens_are_the_routers_alone() -> None:
    """Whatever counts rounds, tokens of the text or votes has one owner."""
    shared = {"num_requests_running", "num_requests_waiting", "num_requests_limit", "pool_depth", "num_sessions"}
    shared |= {"proposals_dropped_total", "answers_dropped_total", "draft_seconds", "model_info", "build_info"}
    shared |= {"certificate_expiry_timestamp_seconds"}
    assert {one.name for one in Metrics().definitions if len(one.owners) > 1} == {f"moot_{name}" for name in shared}


@pytest.mark.parametrize("service", SERVICES)
def test_code_moves_only_what_its_service_exposes(service: str) -> None:
    """A counter that is moved and not exposed would be a lost number; one that nothing moves a promise not kept."""
    moved = {name for path in (ROOT / "services" / service).rglob("*.py") for name in _metrics_named(path)}
    definitions = {one.name.removeprefix("moot_").removesuffix("_total"): one for one in Metrics().definitions}
    moved &= definitions.keys()
    assert not [name for name in moved if service not in definitions[name].owners]
    own = {name for name, one in definitions.items() if service in one.owners}
    assert own - moved == {"build_info", "certificate_expiry_timestamp_seconds"} - moved


def test_every_series_that_is_known_beforehand_is_there_from_the_start() -> None:
    """Prometheus sees no increase of a series that begins at one: what can go wrong begins at zero."""
    text = Metrics("router").exposition().decode()
    for series in ('requests_total{finish_reason="error"}', 'requests_refused_total{code="503"}'):
        assert f"moot_{series} 0.0" in text
    for series in ('request_moves_total{reason="lost"}', 'heartbeats_missed_total{reason="stuck"}'):
        assert f"moot_{series} 0.0" in text


@pytest.mark.parametrize(("tool", "page"), [("metrics_reference.py", "docs/metrics.md"), ("dashboards", "JSON")])
def test_what_is_made_of_the_code_is_as_the_code_says(tool: str, page: str) -> None:
    """The reference page lists the metrics as they are registered, and the dashboards are as their modules say."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"


def _metrics_named(path: Path) -> set[str]:
    """Attributes of anything called `metrics`, and of a name bound to one of them."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            base = node.value
            owner = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            if owner.strip("_") == "metrics":
                named.add(node.attr)
    return named
