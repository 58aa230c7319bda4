"""Rendering the chart with a real helm, and looking things up in what came out."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.setup_tools import TOOLS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "moot"
SCENARIOS = tuple(sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml")))
HELMS = ("helm3", "helm4")
RELEASE, NAMESPACE = "demo", "serving"
TIMEOUT_S = 60
MINIMAL = {"model": {"name": "org/model"}}
"""The least that the chart can be given."""

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


def helm(version: str, *arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs helm offline; `values` are its standard input, to be read with `--values -`."""
    return subprocess.run(
        [tool(version), *arguments],
        input=None if values is None else yaml.safe_dump(dict(values)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def scenario_file(scenario: str) -> Path:
    return CHART / "ci" / f"{scenario}-values.yaml"


@functools.cache
def rendered(scenario: str, version: str = "helm3") -> tuple[Manifest, ...]:
    """All objects of a scenario."""
    done = helm(version, "template", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(scenario_file(scenario)))
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def render(values: Mapping[str, Any], version: str = "helm3", chart: Path = CHART) -> tuple[Manifest, ...]:
    """All objects of the chart with these values."""
    done = helm(version, "template", RELEASE, str(chart), "-n", NAMESPACE, "--values", "-", values=values)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def refusal(values: Mapping[str, Any], version: str = "helm3") -> str:
    """What an operator reads when the chart refuses these values."""
    done = helm(version, "template", RELEASE, str(CHART), "-n", NAMESPACE, "--values", "-", values=values)
    assert done.returncode != 0, "helm took these values"
    return done.stderr


def parse(text: str) -> tuple[Manifest, ...]:
    return tuple(document for document in yaml.safe_load_all(text) if document)


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    (found,) = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


def pod_templates(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Name, and metadata and spec, of everything that makes pods, and of bare pods."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield name, manifest["spec"]["template"]
        elif manifest["kind"] == "Pod":
            yield name, manifest


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def chart_copy(folder: Path) -> Path:
    """The chart somewhere else, to be changed."""
    copy = folder / "moot"
    shutil.copytree(CHART, copy)
    return copy
