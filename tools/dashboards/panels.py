"""What dashboards are made of: variables, rows and panels, as the JSON that Grafana reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

WIDTH = 24
"""Of Grafana's grid."""
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """`queries`: expression to legend. `kind`: timeseries, stat or heatmap. `maximum`: of the axis."""

    title: str
    queries: dict[str, str]
    text: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    maximum: float | None = None
    threshold: float | None = None
    """A line, or the value from which a stat turns red."""


def stat(
    title: str, query: str, text: str, unit: str = "short", width: int = 4, threshold: float | None = None
) -> Panel:
    """One number."""
    return Panel(title, {query: ""}, text, unit, "stat", width, threshold=threshold)


@dataclass(frozen=True)
class Row:
    title: str
    panels: list[Panel]
    height: int = 8


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: list[Row]
    variables: list[Json] = field(default_factory=list)


def source_variable() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}


def label_variable(name: str, label: str, query: str) -> Json:
    """Every value of a label; all of them are chosen at first, and so is a scrape without that label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "values"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def text_variable(name: str, label: str, value: str) -> Json:
    current = {"selected": True, "text": value, "value": value}
    return {"name": name, "label": label, "type": "textbox", "query": value, "current": current, "options": [current]}


def dashboard_json(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["moot"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [_others()],
        "annotations": {"list": []},
        "templating": {"list": dashboard.variables},
        "panels": _placed(dashboard.rows),
    }


def _others() -> Json:
    """A menu of Moot's dashboards, which takes the variables along."""
    return {
        "title": "Moot",
        "type": "dashboards",
        "tags": ["moot"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "icon": "external link",
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def _placed(rows: list[Row]) -> list[Json]:
    placed: list[Json] = []
    top = 0
    for row in rows:
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        placed.append(
            {"id": len(placed) + 1, "type": "row", "title": row.title, "gridPos": at, "collapsed": False, "panels": []}
        )
        top += 1
        left = 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left = top + row.height, 0
            at = {"h": row.height, "w": panel.width, "x": left, "y": top}
            placed.append(_panel_json(panel, len(placed) + 1, at))
            left += panel.width
        top += row.height
    return placed


def _panel_json(panel: Panel, number: int, at: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, index, *query) for index, query in enumerate(panel.queries.items())],
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit}
    if panel.kind == "heatmap":
        return defaults
    defaults["min"] = 0
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.threshold is not None:
        steps.append({"color": "red", "value": panel.threshold})
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.threshold is None else "line"},
        }
    return defaults


def _target(panel: Panel, index: int, expression: str, legend: str) -> Json:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": expression,
        "legendFormat": legend,
        "range": True,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
    }


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "graphMode": "area",
        "colorMode": "value",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "fill": "dark-blue", "exponent": 0.5},
        "yAxis": {"axisPlacement": "left", "unit": "short"},
        "legend": {"show": True},
        "cellGap": 1,
    },
}
