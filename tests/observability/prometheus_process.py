"""A real Prometheus that scrapes the processes of a test every second, with the rules as they are shipped."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from moot.runtime.supervisor import Supervisor
from tests.integration.processes import LOOPBACK, START_TIMEOUT_S
from tests.observability.needed_tools import program
from tests.observability.shown_expressions import RULES

NAMESPACE = "test"
_TIMEOUT_S = 20.0


class Prometheus:
    """`targets`: metrics ports by job. Alerts fire as soon as their condition holds: how long they wait is tested by
    promtool."""

    def __init__(self, supervisor: Supervisor, folder: Path, targets: Mapping[str, Sequence[int]]) -> None:
        self._url = f"http://{LOOPBACK}:{_free_port()}"
        # One for all questions: each new one would read the system's certificates.
        self._http = httpx.Client(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False)
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(folder, targets)))
        argv = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
        ]
        child = supervisor.spawn("prometheus", argv, essential=False, look=self._look)
        supervisor.wait_ready([child], START_TIMEOUT_S)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The present value of each series: `metric` (labels) and `value` ([time, text]). Raises AssertionError with
        Prometheus's own words when it cannot be evaluated."""
        answer = self._get("/api/v1/query", query=expression)
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        data = answer["data"]
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        return list(data["result"])

    def value(self, expression: str) -> float | None:
        """Of the only series; None where there is none."""
        found = self.query(expression)
        assert len(found) <= 1, f"{expression}: {len(found)} series"
        return float(found[0]["value"][1]) if found else None

    def numbers(self, expression: str) -> list[float]:
        """Values that are numbers: 0 divided by 0 is none."""
        values = [float(series["value"][1]) for series in self.query(expression)]
        return [value for value in values if not math.isnan(value)]

    def firing(self) -> set[str]:
        return {series["metric"]["alertname"] for series in self.query('ALERTS{alertstate="firing"}')}

    def rule_errors(self) -> dict[str, str]:
        """Name of each rule that could not be evaluated, to why."""
        groups = self._get("/api/v1/rules")["data"]["groups"]
        every = [rule for group in groups for rule in group["rules"]]
        assert every
        return {rule["name"]: rule.get("lastError", "") for rule in every if rule["health"] == "err"}

    def _look(self) -> dict[str, Any] | None:
        try:
            return {} if self._http.get("/-/ready").status_code == 200 else None
        except httpx.TransportError:
            return None

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        return dict(self._http.get(path, params=parameters).json())


def _config(folder: Path, targets: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    files = []
    for path in sorted(RULES.glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        for group in content["groups"]:
            for rule in group["rules"]:
                rule.pop("for", None)
        files.append(str(folder / path.name))
        Path(files[-1]).write_text(yaml.safe_dump(content))
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": files,
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [f"{LOOPBACK}:{port}" for port in ports], "labels": {"namespace": NAMESPACE}}
                ],
            }
            for job, ports in targets.items()
        ],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
