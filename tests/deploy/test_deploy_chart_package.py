"""The chart as it is handed out: packed by `helm package`, and installed, dry, from there."""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import (
    CHART,
    HELMS,
    NAMESPACE,
    RELEASE,
    SCENARIOS,
    Manifest,
    helm,
    parse,
    rendered,
    scenario_file,
)

SECRET_BYTES = 1024 * 1024
"""What one Secret may hold; a release is kept in one."""


@pytest.fixture(scope="module", params=HELMS)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed by either helm."""
    folder = tmp_path_factory.mktemp("package")
    done = helm(request.param, "package", str(CHART), "--destination", str(folder))
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.tgz")
    return found


def test_a_package_has_what_an_installation_needs(package: Path) -> None:
    """Templates and every file that they read, and nothing of how the chart is made and tested."""
    with tarfile.open(package) as archive:
        packed = {name.removeprefix("moot/") for name in archive.getnames()}
    folders = ("templates", "files")
    wanted = {path.relative_to(CHART).as_posix() for folder in folders for path in (CHART / folder).rglob("*.*")}
    assert packed == wanted | {"Chart.yaml", "README.md", "values.yaml", "values.schema.json", ".helmignore"}


def planned(package: Path, scenario: str) -> dict[str, Any]:
    """The release that helm 4 would make. (Helm 3 asks an API server for its version even then.)"""
    arguments = ("install", RELEASE, str(package), "-n", NAMESPACE, "-f", str(scenario_file(scenario)))
    done = helm("helm4", *arguments, "--dry-run=client", "--output", "json")
    assert done.returncode == 0, done.stderr
    release: dict[str, Any] = json.loads(done.stdout)
    return release


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_installation_is_what_was_rendered(package: Path, scenario: str) -> None:
    """`helm install` from the package makes the objects that all other tests look at, and small enough a release."""

    def by_name(manifests: tuple[Manifest, ...]) -> dict[tuple[str, str], Manifest]:
        return {(one["kind"], one["metadata"]["name"]): one for one in manifests}

    release = planned(package, scenario)
    hooks = by_name(tuple(document for hook in release.get("hooks", ()) for document in parse(hook["manifest"])))
    assert by_name(parse(release["manifest"])) | hooks == by_name(rendered(scenario))
    # Hooks are the objects of `helm test`, which an installation does not make.
    assert all("helm.sh/hook" in hook["metadata"]["annotations"] for hook in hooks.values())
    assert f"namespace {NAMESPACE}" in release["info"]["notes"]
    kept = base64.b64encode(gzip.compress(json.dumps(release).encode()))
    assert len(kept) < SECRET_BYTES / 2, "dashboards and rules are part of each release"
