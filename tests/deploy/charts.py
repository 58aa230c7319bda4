"""Rendering the chart with a real helm, and looking things up in what came out."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from moot.config import load_config
from services.drafter.config import DrafterConfig
from services.router.config import RouterConfig
from services.verifier.config import VerifierConfig
from tests.deploy.setup_tools import TOOLS
from tests.programs import run

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "moot"
SCENARIOS = tuple(sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml")))
HELMS = ("helm3", "helm4")
RELEASE, NAMESPACE = "demo", "serving"
MINIMAL: dict[str, Any] = {"model": {"name": "org/model"}}
"""The least that the chart can be given."""
CONFIGS: dict[str, type] = {"router": RouterConfig, "verifier": VerifierConfig, "drafter": DrafterConfig}

Manifest = dict[str, Any]


def tool(name: str) -> Path:
    """The path of a tool; where it cannot be had the test is skipped, and fails in CI, which installs them all."""
    path = TOOLS / name
    if not path.exists():
        reason = f"{name} is not there: python tests/deploy/setup_tools.py"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@dataclass(frozen=True)
class PodTemplate:
    """What pods are made from. `owner`: the Deployment, StatefulSet or Job that makes them, or the pod itself; `file`:
    the YAML that its program reads, empty where it reads none."""

    owner: Manifest
    file: str

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._template["metadata"]["labels"])

    @property
    def annotations(self) -> dict[str, str]:
        return dict(self._template["metadata"].get("annotations", {}))

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def role(self) -> str:
        return self.component.partition("-")[0]

    @property
    def spec(self) -> Manifest:
        return dict(self._template["spec"])

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def container(self) -> Manifest:
        """The one that stays."""
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def env(self) -> dict[str, Manifest]:
        return {variable["name"]: variable for variable in self.container.get("env", [])}

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    @property
    def volumes(self) -> dict[str, Manifest]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", [])}

    @property
    def config(self) -> Manifest:
        return dict(yaml.safe_load(self.file))

    def program(self) -> Any:
        """The config that the program makes of its file and of the environment that the chart gives it, in which a
        secret is the name of its key."""
        given = {
            name: variable.get("valueFrom", {}).get("secretKeyRef") or variable for name, variable in self.env.items()
        }
        environ = {name: str(source.get("key") or source.get("value", "")) for name, source in given.items()}
        for name in environ:
            environ[name] = re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], environ[name])
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(self.file)
            file.flush()
            return load_config(CONFIGS[self.role], ["--config", file.name], environ)

    @property
    def _template(self) -> Manifest:
        return dict(self.owner["spec"].get("template") or self.owner)


@dataclass(frozen=True)
class Release:
    """The objects that the chart makes of `values`. `notes`: what an operator reads then, if it was asked for."""

    values: Mapping[str, Any]
    objects: tuple[Manifest, ...]
    notes: str = ""

    @functools.cached_property
    def by_name(self) -> dict[tuple[str, str], Manifest]:
        """By kind and name."""
        return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in self.objects}

    @functools.cached_property
    def pods(self) -> tuple[PodTemplate, ...]:
        """Everything that makes pods, and bare pods."""
        owners = self.of_kind("Deployment", "StatefulSet", "DaemonSet", "Job", "Pod")
        return tuple(PodTemplate(owner, self._file(owner)) for owner in owners)

    @property
    def programs(self) -> tuple[PodTemplate, ...]:
        """Those of our own roles."""
        return tuple(pod for pod in self.pods if pod.role in CONFIGS)

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self.objects if manifest["kind"] in kinds]

    def one(self, kind: str, component: str) -> Manifest:
        """The object of a component, by its name."""
        (found,) = [one for one in self.of_kind(kind) if one["metadata"]["name"].endswith(f"-{component}")]
        return found

    def pod(self, component: str) -> PodTemplate:
        (found,) = [pod for pod in self.pods if pod.component == component]
        return found

    def _file(self, owner: Manifest) -> str:
        pod = PodTemplate(owner, "")
        if "configMap" not in pod.volumes.get("config", {}):
            return ""
        files = self.by_name["ConfigMap", pod.volumes["config"]["configMap"]["name"]]["data"]
        return str(files.get("config.yaml", ""))


def helm(
    version: str, verb: str, *arguments: str, values: Mapping[str, Any], chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Runs helm offline on a chart with these values."""
    where = (str(chart), "-n", NAMESPACE, "--values", "-")
    return run(tool(version), verb, *arguments, *where, sent=yaml.safe_dump(dict(values)))


def scenario_values(scenario: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "ci" / f"{scenario}-values.yaml").read_text()))


def given(text: str) -> dict[str, Any]:
    """The least values, and the members of a YAML mapping whose keys are paths: `router.replicas: 2, redis: {}`."""
    values = copy.deepcopy(MINIMAL)
    for path, value in yaml.safe_load(f"{{{text}}}").items():
        *above, last = path.split(".")
        functools.reduce(lambda node, key: node.setdefault(key, {}), above, values)[last] = value
    return values


def render(values: Mapping[str, Any], version: str = "helm3") -> Release:
    """The objects of the chart with these values."""
    done = helm(version, "template", RELEASE, values=values)
    assert done.returncode == 0, done.stderr
    return Release(values, parse(done.stdout))


@functools.cache
def rendered(scenario: str) -> Release:
    """What helm 4 would install of a scenario, `helm test` included. (Helm 3 asks an API server even for a plan.)"""
    values = scenario_values(scenario)
    done = helm("helm4", "install", RELEASE, "--dry-run=client", "--output", "json", values=values)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    hooks = [document for hook in plan.get("hooks", ()) for document in parse(hook["manifest"])]
    return Release(values, (*parse(plan["manifest"]), *hooks), plan["info"]["notes"])


def refusal(values: Mapping[str, Any], version: str = "helm3") -> str:
    """What an operator reads when the chart refuses these values."""
    done = helm(version, "template", RELEASE, values=values)
    assert done.returncode != 0, "helm took these values"
    return done.stderr


def parse(text: str) -> tuple[Manifest, ...]:
    return tuple(document for document in yaml.load_all(text, yaml.CSafeLoader) if document)
