"""Every expression of the dashboards and rules, as they are shipped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "operations" / "runbooks.md"
OPERATIONS = sorted((ROOT / "docs" / "operations").glob("*.md"))

CHOSEN = {
    "$__rate_interval": "30s",
    "$namespace": ".*",
    "$model": ".*",
    "$pool": ".*",
    "$verifier_price": "2.5",
    "$drafter_price": "0.5",
}
"""What Grafana puts in for the variables, all values chosen."""


@dataclass(frozen=True, slots=True)
class Shown:
    """`where`: dashboard and panel, or the rule's name."""

    where: str
    expression: str


def dashboard(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def filled(expression: str) -> str:
    for variable, value in CHOSEN.items():
        expression = expression.replace(variable, value)
    return expression


def of_dashboards() -> list[Shown]:
    return [
        Shown(f"{path.stem}: {panel['title']}", filled(target["expr"]))
        for path in DASHBOARDS
        for panel in dashboard(path)["panels"]
        for target in panel.get("targets", ())
    ]


def rules(name: str) -> list[dict[str, Any]]:
    """Of the file recording.yaml or alerts.yaml."""
    groups = yaml.safe_load((RULES / f"{name}.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_rules() -> list[Shown]:
    every = [*rules("recording"), *rules("alerts")]
    return [Shown(rule.get("record") or rule["alert"], rule["expr"]) for rule in every]
