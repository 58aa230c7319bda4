"""The packed chart by both helms: `install`, `upgrade` and `uninstall` against an API server that keeps objects and
runs nothing."""

from __future__ import annotations

import copy
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import CHART, HELMS, NAMESPACE, RELEASE, rendered, tool
from tests.deploy.object_server import ObjectServer, object_server
from tests.programs import output

OF_HELM = ("meta.helm.sh/release-name", "meta.helm.sh/release-namespace")
"""What helm marks its own with."""
SECRET_BYTES = 1024 * 1024
"""What one Secret may hold; a release is kept in one."""


@pytest.fixture(scope="module", params=HELMS)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A helm, and the chart that it packed."""
    folder = tmp_path_factory.mktemp("package")
    output(tool(request.param), "package", CHART, "--destination", folder)
    (found,) = folder.glob("*.tgz")
    return request.param, found


class Cluster:
    """One helm and the chart that it packed, and the server that it installs to."""

    def __init__(self, package: tuple[str, Path], server: ObjectServer, kubeconfig: Path) -> None:
        self.server = server
        self._version, self._chart = package
        self._kubeconfig = kubeconfig

    def helm(self, *arguments: str | Path) -> str:
        # A server of one's own need not be skipped.
        where = ("--kubeconfig", self._kubeconfig, "-n", NAMESPACE, "--qps", "1000", "--burst-limit", "1000")
        # What helm keeps of its own goes where the test's files are.
        environ = {**os.environ, "HOME": str(self._kubeconfig.parent)}
        return output(tool(self._version), *arguments, *where, env=environ)

    def put(self, verb: str, scenario: str, *settings: str) -> str:
        # The server has no schemas: other tests validate the objects against those of each Kubernetes.
        values = ("-f", CHART / "ci" / f"{scenario}-values.yaml", "--disable-openapi-validation")
        return self.helm(verb, RELEASE, self._chart, *values, *(part for one in settings for part in ("--set", one)))

    def objects(self) -> dict[tuple[str, str], Any]:
        found = copy.deepcopy(self.server.of_release())
        for one in found.values():
            marks = one["metadata"].get("annotations", {})
            for mark in OF_HELM:
                marks.pop(mark, None)
            if not marks:
                one["metadata"].pop("annotations", None)
        return found


@pytest.fixture
def cluster(package: tuple[str, Path], tmp_path: Path) -> Iterator[Cluster]:
    with object_server(tmp_path) as (server, kubeconfig):
        yield Cluster(package, server, kubeconfig)


def test_a_package_has_what_an_installation_needs(package: tuple[str, Path]) -> None:
    """Templates and every file that they read, and nothing of how the chart is made and tested."""
    with tarfile.open(package[1]) as archive:
        packed = {name.removeprefix("moot/") for name in archive.getnames()}
    folders = ("templates", "files")
    wanted = {path.relative_to(CHART).as_posix() for folder in folders for path in (CHART / folder).rglob("*.*")}
    assert packed == wanted | {"Chart.yaml", "README.md", "values.yaml", "values.schema.json", ".helmignore"}


def test_an_installation_comes_and_goes(cluster: Cluster, scenario: str) -> None:
    """What was rendered is created, what others need first; its record is small enough; and only the claim with fetched
    models stays behind."""
    release = rendered(scenario)
    assert release.notes.strip() in cluster.put("install", scenario)
    # Hooks are the objects of `helm test`, which an installation does not make.
    annotations = {key: one["metadata"].get("annotations", {}) for key, one in release.by_name.items()}
    assert cluster.objects() == {
        key: release.by_name[key] for key in annotations if "helm.sh/hook" not in annotations[key]
    }
    (record,) = cluster.server.records()
    assert len(record) < SECRET_BYTES / 2, "dashboards and rules are part of each release"
    # Policies, accounts and files first: a pod never starts without them.
    order = [path.split(f"/{NAMESPACE}/")[1].split("/")[0] for _, path in cluster.server.written]
    first = order.index("deployments")
    for kind in ("networkpolicies", "serviceaccounts", "configmaps", "roles", "rolebindings", "services"):
        assert all(place < first for place, found in enumerate(order) if found == kind), kind
    cluster.helm("uninstall", RELEASE)
    kept = {("PersistentVolumeClaim", "demo-moot-models")} & set(release.by_name)
    assert {*cluster.objects()} == kept
    assert {key for key in annotations if "helm.sh/resource-policy" in annotations[key]} == kept


def test_an_upgrade_changes_what_it_says(cluster: Cluster) -> None:
    """A changed option is its role's ConfigMap and, for its pods to read it, its Deployment; a rollback undoes it."""
    cluster.put("install", "minimal-cpu")
    before = cluster.objects()
    cluster.put("upgrade", "minimal-cpu", "router.config.maxChoicesPerKey=7")
    after = cluster.objects()
    changed = {key for key in before if before[key] != after[key]}
    assert after.keys() == before.keys()
    assert changed == {("ConfigMap", "demo-moot-router"), ("Deployment", "demo-moot-router")}
    assert "max_choices_per_key: 7" in after["ConfigMap", "demo-moot-router"]["data"]["config.yaml"]
    cluster.helm("rollback", RELEASE, "1")
    assert cluster.objects() == before
