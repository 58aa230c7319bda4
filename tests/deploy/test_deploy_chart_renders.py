"""The chart's scenarios with helm 3 and 4: they lint, render alike, and are what each Kubernetes accepts."""

from __future__ import annotations

import json

import pytest

from tests.deploy.charts import (
    HELMS,
    NAMESPACE,
    RELEASE,
    ROOT,
    SCENARIOS,
    Release,
    given,
    helm,
    render,
    rendered,
    scenario_values,
    tool,
)
from tests.programs import output

KUBERNETES = tuple(f"1.{minor}" for minor in range(29, 38))

CUSTOM = {
    "PodMonitor": {"selector", "podTargetLabels", "podMetricsEndpoints"},
    "ServiceMonitor": {"selector", "targetLabels", "endpoints"},
    "PrometheusRule": {"groups"},
    "ScaledObject": {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"),
        *("advanced", "triggers"),
    },
    "HTTPRoute": {"parentRefs", "hostnames", "rules"},
    "Certificate": {
        *("secretName", "issuerRef", "duration", "renewBefore", "privateKey", "usages", "uris", "dnsNames"),
    },
}
"""Kinds of other projects, whose schemas are not at hand, with the fields of their specs that the chart may set."""


@pytest.mark.parametrize("version", HELMS)
def test_a_scenario_passes_the_strict_linter(scenario: str, version: str) -> None:
    """No warning of helm's linter is let pass, by either helm."""
    done = helm(version, "lint", "--strict", values=scenario_values(scenario))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_both_helms_render_the_same_objects(release: Release) -> None:
    """An operator's helm does not decide what runs."""
    assert render(release.values, "helm3").by_name == release.by_name


def test_every_kubernetes_accepts_every_scenario() -> None:
    """Strictly valid, unknown fields included, from the chart's kubeVersion to the newest schemas there are."""
    objects = [manifest for scenario in SCENARIOS for manifest in rendered(scenario).objects]
    asked = {"versions": KUBERNETES, "manifests": [one for one in objects if one["kind"] not in CUSTOM]}
    validator = ROOT / "tests" / "deploy" / "validate_manifests.py"
    assert json.loads(output(tool("venv/bin/python"), validator, sent=json.dumps(asked))) == []


def test_objects_of_other_projects_have_known_fields_only(release: Release) -> None:
    """What no schema here can check says nothing that its project does not know."""
    for manifest in release.of_kind(*CUSTOM):
        assert set(manifest["spec"]) <= CUSTOM[manifest["kind"]], manifest["metadata"]["name"]
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}


def test_the_scenarios_use_every_kind_of_object() -> None:
    """A template that no scenario renders is tested by nothing."""
    kinds = {manifest["kind"] for scenario in SCENARIOS for manifest in rendered(scenario).objects}
    assert kinds >= {
        *("Deployment", "StatefulSet", "Service", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Pod"),
        *("NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler", "PersistentVolumeClaim", "Ingress"),
        *("PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "Certificate"),
    }


@pytest.mark.parametrize("version", HELMS)
def test_an_old_kubernetes_is_refused(version: str) -> None:
    """The chart says from which version on it works, and helm holds it to that."""
    done = helm(version, "template", RELEASE, "--kube-version", "1.28.0", values=given(""))
    assert done.returncode != 0
    assert "kubeVersion" in done.stderr


def test_notes_name_what_is_there(release: Release) -> None:
    """NOTES.txt is true: the Service it asks, the model and the drafters it names are those of the release."""
    for line in release.notes.splitlines():
        if "port-forward" in line:
            name, _, ports = line.partition("svc/")[2].partition(" ")
            service = release.by_name["Service", name]
            assert int(ports.split()[0].split(":")[1]) in {port["port"] for port in service["spec"]["ports"]}
    router = release.pod("router")
    assert f'"model": "{router.config["served_model_name"][0]}"' in release.notes
    for entry in router.config["drafters"]:
        assert entry.partition("=")[0] in release.notes
    assert f"namespace {NAMESPACE}" in release.notes
    assert ("Authorization" in release.notes) == ("api_keys_file" in router.config)
    assert ("recorded in each router's memory only" in release.notes) == ("MOOT_REDIS_URL" not in router.env)
    assert (f"helm -n {NAMESPACE} test" in release.notes) == ("test" in {pod.component for pod in release.pods})
