"""`helm install`, `upgrade` and `uninstall` by both helms against an API server that keeps objects and runs nothing."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import CHART, HELMS, NAMESPACE, RELEASE, SCENARIOS, TIMEOUT_S, rendered, scenario_file, tool
from tests.deploy.object_server import ObjectServer, object_server

# What helm marks its own with.
_OF_HELM = ("meta.helm.sh/release-name", "meta.helm.sh/release-namespace")


class Cluster:
    """One helm, and the server that it installs to."""

    def __init__(self, version: str, server: ObjectServer, kubeconfig: Path) -> None:
        self.server = server
        self._version = version
        self._kubeconfig = kubeconfig

    def helm(self, *arguments: str) -> str:
        # A server of one's own need not be skipped.
        where = ("--kubeconfig", self._kubeconfig, "-n", NAMESPACE, "--qps", "1000", "--burst-limit", "1000")
        command = [tool(self._version), *arguments, *where]
        # What helm keeps of its own goes where the test's files are.
        environ = {**os.environ, "HOME": str(self._kubeconfig.parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def put(self, verb: str, scenario: str, *settings: str) -> str:
        # The server has no schemas: other tests validate the objects against those of each Kubernetes.
        values = ("-f", str(scenario_file(scenario)), "--disable-openapi-validation")
        return self.helm(verb, RELEASE, str(CHART), *values, *(part for one in settings for part in ("--set", one)))

    def objects(self) -> dict[tuple[str, str], Any]:
        found = copy.deepcopy(self.server.of_release())
        for one in found.values():
            marks = one["metadata"].get("annotations", {})
            for mark in _OF_HELM:
                marks.pop(mark, None)
            if not marks:
                one["metadata"].pop("annotations", None)
        return found


@pytest.fixture(params=HELMS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with object_server(tmp_path) as (server, kubeconfig):
        yield Cluster(request.param, server, kubeconfig)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_installation_comes_and_goes(cluster: Cluster, scenario: str) -> None:
    """What was rendered is created, what others need first; and only the claim with fetched models stays behind."""
    assert "helm -n serving test" in cluster.put("install", scenario) or scenario == "static-peers"
    expected = {
        (one["kind"], one["metadata"]["name"]): one
        for one in rendered(scenario)
        if "helm.sh/hook" not in one["metadata"].get("annotations", {})
    }
    assert cluster.objects() == expected
    # Policies, accounts and files first: a pod never starts without them.
    order = [path.split(f"/{NAMESPACE}/")[1].split("/")[0] for _, path in cluster.server.written]
    first = order.index("deployments")
    for kind in ("networkpolicies", "serviceaccounts", "configmaps", "roles", "rolebindings", "services"):
        assert all(place < first for place, found in enumerate(order) if found == kind), kind
    cluster.helm("uninstall", RELEASE)
    kept = {
        key for key, one in expected.items() if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
    }
    assert {*cluster.objects()} == kept
    assert kept <= {("PersistentVolumeClaim", "demo-moot-models")}


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
