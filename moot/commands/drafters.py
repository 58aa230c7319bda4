"""`moot drafters`: the kinds there are, and what the drafters of a running server have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from moot.client import DEFAULT_URL, Client, ClientOptions, RequestFailed
from moot.commands.common import table
from moot.config import load_config
from moot.core.options import Options, option, option_of
from moot.drafters.registry import MODEL_FREE_KINDS, REQUEST_KINDS, attached_kinds, known_kinds
from moot.shipped import PREFIX, shipped_drafters

COLUMNS = {
    "moot_proposal_tokens_total": "proposed",
    "moot_proposals_accepted_tokens_total": "accepted",
    "moot_votes_won_total": "votes won",
    "moot_drafter_weight": "weight",
}


@dataclass(frozen=True, kw_only=True)
class DraftersConfig(Options):
    url: str | None = option(None, help=f"a router; without it, {DEFAULT_URL} is looked at if it answers")
    api_key: str | None = option_of(ClientOptions, "api_key")


def run(argv: Sequence[str]) -> int:
    config = load_config(
        DraftersConfig,
        argv,
        prog="moot drafters",
        description="List the drafter kinds, and the drafters of a running server with their counts since its start.",
        example="moot drafters --url http://127.0.0.1:8000",
    )
    kinds = [[kind, "no" if kind in (*MODEL_FREE_KINDS, *REQUEST_KINDS) else "yes"] for kind in known_kinds()]
    kinds += [[kind, "the target's, attached to the verifier"] for kind in attached_kinds()]
    print(table(["kind", "needs a model"], kinds))
    print("\n" + table(["trained, by name"], [[PREFIX + name] for name in shipped_drafters()]))
    try:
        exposition = Client(config.url or DEFAULT_URL, config.api_key).get("/metrics").decode()
    except RequestFailed as error:
        if config.url:
            raise
        print(f"\nNo running drafters to show: {error}")
        return 0
    running = drafter_rows(exposition)
    print(f"\nDrafters of {config.url or DEFAULT_URL}:")
    print(table(["drafter", *COLUMNS.values()], running) if running else "  none has proposed anything yet")
    return 0


def drafter_rows(exposition: str) -> list[list[str]]:
    """One row per drafter from Prometheus's text format: name, then the columns of COLUMNS."""
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in COLUMNS and "drafter" in sample.labels:
                values.setdefault(sample.labels["drafter"], {})[sample.name] = sample.value
    return [
        [drafter, *(f"{row[name]:g}" if name in row else "-" for name in COLUMNS)]
        for drafter, row in sorted(values.items())
    ]
