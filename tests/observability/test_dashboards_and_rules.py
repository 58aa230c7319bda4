"""Dashboards, rules and alerts as files: of the right types, well written, and about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from moot.runtime.metrics import Metrics
from tests.observability.needed_tools import module, program
from tests.observability.shown_expressions import (
    DASHBOARDS,
    OPERATIONS,
    RULES,
    RUNBOOKS,
    dashboard,
    filled,
    of_dashboards,
    of_rules,
    rules,
)

promql = module("promql_parser", "promql-parser")


def _promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)


def _known_names() -> set[str]:
    """Series of Moot's own metrics and of its recording rules, and `up`."""
    names = {rule["record"] for rule in rules("recording")} | {"up"}
    for one in Metrics().definitions:
        ends = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        names |= {one.name + end for end in ends}
    return names


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_what_grafana_reads(path: Path) -> None:
    """It loads into Grafana's own types, and every panel and query keeps its kind there."""
    sdk = "grafana_foundation_sdk"
    names = ("cog.plugins", "cog.encoder", "models.dashboard", "models.prometheus")
    plugins, encoder, types, prometheus = (module(f"{sdk}.{name}", "grafana-foundation-sdk") for name in names)
    plugins.register_default_plugins()
    shown = dashboard(path)
    loaded = types.Dashboard.from_json(shown)
    assert loaded.uid == f"moot-{path.stem}"
    assert len(loaded.panels or []) == len(shown["panels"]) > 10
    for panel in loaded.panels or []:
        if not isinstance(panel, types.RowPanel):
            assert panel.type_val in ("timeseries", "stat", "heatmap")
            assert panel.targets
            assert all(isinstance(target, prometheus.Dataquery) for target in panel.targets)
    # What the types do not know would be lost here.
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(loaded))
    for given, kept in zip(shown["panels"], again["panels"], strict=True):
        assert _missing(given, kept) == [], given["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_the_variables_and_explains_itself(path: Path) -> None:
    """Data source, namespace, model and pool; a description for every panel; no panel over another; no id twice."""
    shown = dashboard(path)
    variables = [variable["name"] for variable in shown["templating"]["list"]]
    assert variables[:4] == ["datasource", "namespace", "model", "pool"]
    panels = [panel for panel in shown["panels"] if panel["type"] != "row"]
    assert all(panel["description"] and panel["title"] for panel in panels)
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    text = path.read_text()
    used = set(re.findall(r"\$\{?([a-z_]+)", text)) - {"__rate_interval", "__all"}
    assert used <= set(variables)
    # A panel without the variable would show other namespaces' numbers.
    assert all("$namespace" in target["expr"] for panel in panels for target in panel["targets"])


def test_every_expression_parses_and_names_series_that_exist() -> None:
    """A metric that is renamed takes its panels and alerts along, or the build fails."""
    known = _known_names()
    for shown in [*of_dashboards(), *of_rules()]:
        names = {selector.name for selector in _selectors(promql.parse(shown.expression))}
        unknown = {name for name in names if name not in known and not name.startswith("moot_process_")}
        assert not unknown, f"{shown.where}: {unknown}"


def test_variables_ask_for_labels_that_exist() -> None:
    """A variable without values would empty the whole dashboard."""
    labels = {one.name: set(one.labels) for one in Metrics().definitions}
    for path in DASHBOARDS:
        for variable in dashboard(path)["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", filled(variable["definition"]))
                assert found, variable["definition"]
                metric, label = found.groups()
                assert label == "namespace" or label in labels[metric]


def test_rules_pass_promtool() -> None:
    """Prometheus loads them."""
    done = _promtool("check", "rules", *map(str, sorted(RULES.glob("*.yaml"))))
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_pass_promtool() -> None:
    """Names, units and help texts are as Prometheus's conventions say."""
    done = _promtool("check", "metrics", given=Metrics("router").exposition().decode())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((RULES / "tests").glob("*.yaml")), ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    """Prometheus's own unit tests of the rules."""
    done = _promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    """An alert that was never seen to fire may be deaf; one that was never seen to be silent may always shout."""
    fired: set[str] = set()
    silent: set[str] = set()
    for path in (RULES / "tests").glob("*.yaml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test["alert_rule_test"]:
                (fired if case["exp_alerts"] else silent).add(case["alertname"])
    names = {rule["alert"] for rule in rules("alerts")}
    assert fired == names
    assert silent == names


def test_every_alert_has_a_runbook_a_severity_and_a_sentence() -> None:
    """Whoever is woken finds what it means and what to do, under the alert's own name, in the order of the file."""
    headings = re.findall(r"^## (Moot\w+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    alerts = rules("alerts")
    assert headings == [rule["alert"] for rule in alerts]
    for rule in alerts:
        notes = rule["annotations"]
        assert notes["runbook_url"] == f"docs/operations/runbooks.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert notes["summary"]
        assert notes["description"].endswith(".")


def test_panels_that_pages_for_operators_name_are_there() -> None:
    """Whoever is sent to `Fleet, *Sessions*` finds a panel of that name on that dashboard."""
    titles = {path.stem: {panel["title"] for panel in _panels(dashboard(path))} for path in DASHBOARDS}
    text = " ".join(" ".join(page.read_text() for page in OPERATIONS).split())
    named = re.findall(r"(Overview|Speculation|Fleet)[,:] ((?:\*[^*]+\*(?: by \w+)?(?:, | and )?)+)", text)
    sent = {(name.lower(), panel) for name, panels in named for panel in re.findall(r"\*([^*]+)\*", panels)}
    assert len(sent) > 20
    assert [(name, panel) for name, panel in sorted(sent) if panel not in titles[name]] == []


def _panels(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for outer in node.get("panels", ()) for panel in (outer, *_panels(outer))]


def _selectors(expression: Any) -> list[Any]:
    """All vector selectors in it."""
    match expression:
        case promql.VectorSelector():
            return [expression]
        case promql.MatrixSelector():
            return [expression.vector_selector]
        case promql.BinaryExpr():
            return [*_selectors(expression.lhs), *_selectors(expression.rhs)]
        case promql.Call():
            return [selector for argument in expression.args for selector in _selectors(argument)]
        case promql.NumberLiteral() | promql.StringLiteral():
            return []
        case _:
            return _selectors(expression.expr)


def _missing(given: Any, kept: Any, path: str = "") -> list[str]:
    """What stands in `given` and not in `kept`, unless it is empty."""
    if isinstance(given, dict):
        if not isinstance(kept, dict):
            return [path] if given else []
        return [
            name
            for key, value in given.items()
            for name in (_missing(value, kept.get(key), f"{path}.{key}") if value not in (None, "", [], {}) else [])
        ]
    if isinstance(given, list):
        if not isinstance(kept, list) or len(given) != len(kept):
            return [path]
        return [name for one, two in zip(given, kept, strict=True) for name in _missing(one, two, path + "[]")]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]
