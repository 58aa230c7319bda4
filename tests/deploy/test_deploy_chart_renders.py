"""The chart's scenarios with helm 3 and 4: they lint, render alike, and are what each Kubernetes accepts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.charts import (
    CHART,
    HELMS,
    NAMESPACE,
    RELEASE,
    SCENARIOS,
    chart_copy,
    helm,
    of_kind,
    one,
    render,
    rendered,
    scenario_file,
    tool,
)

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
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_passes_the_strict_linter(scenario: str, version: str) -> None:
    """No warning of helm's linter is let pass, by either helm."""
    done = helm(version, "lint", "--strict", str(CHART), "-n", NAMESPACE, "-f", str(scenario_file(scenario)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_helms_render_the_same_objects(scenario: str) -> None:
    """An operator's helm does not decide what runs."""

    def by_name(version: str) -> dict[tuple[str, str], object]:
        return {(one["kind"], one["metadata"]["name"]): one for one in rendered(scenario, version)}

    assert by_name("helm3") == by_name("helm4")
    assert len(by_name("helm3")) == len(rendered(scenario)), "two objects of one kind and name"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_kubernetes_accepts_a_scenario(scenario: str) -> None:
    """Strictly valid, unknown fields included, from the chart's kubeVersion to the newest schemas there are."""
    python = tool("venv/bin/python")
    manifests = [manifest for manifest in rendered(scenario) if manifest["kind"] not in CUSTOM]
    done = subprocess.run(
        [python, CHART.parents[2] / "tests" / "deploy" / "validate_manifests.py"],
        input=json.dumps({"versions": KUBERNETES, "manifests": manifests}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_of_other_projects_have_known_fields_only(scenario: str) -> None:
    """What no schema here can check says nothing that its project does not know."""
    for manifest in rendered(scenario):
        if manifest["kind"] in CUSTOM:
            assert set(manifest["spec"]) <= CUSTOM[manifest["kind"]], manifest["metadata"]["name"]
            assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}


def test_the_scenarios_use_every_kind_of_object() -> None:
    """A template that no scenario renders is tested by nothing."""
    kinds = {manifest["kind"] for scenario in SCENARIOS for manifest in rendered(scenario)}
    assert kinds >= {
        *("Deployment", "StatefulSet", "Service", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Pod"),
        *("NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler", "PersistentVolumeClaim", "Ingress"),
        *("PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "Certificate"),
    }


@pytest.mark.parametrize("version", HELMS)
def test_an_old_kubernetes_is_refused(version: str) -> None:
    """The chart says from which version on it works, and helm holds it to that."""
    values = str(scenario_file("minimal-cpu"))
    done = helm(version, "template", RELEASE, str(CHART), "-f", values, "--kube-version", "1.28.0")
    assert done.returncode != 0
    assert "kubeVersion" in done.stderr


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_notes_name_what_is_there(scenario: str, tmp_path: Path) -> None:
    """NOTES.txt is true: the Service it asks, the model and the drafters it names are those of the release."""
    chart = chart_copy(tmp_path)
    # helm shows notes of an installation only: here they are an object of the chart.
    wrapper = '{kind: Notes, metadata: {name: notes}, text: {{ include "moot/templates/NOTES.txt" . | toJson }}}'
    (chart / "templates" / "notes.yaml").write_text(wrapper)
    manifests = render(yaml.safe_load(scenario_file(scenario).read_text()), chart=chart)
    notes = one(manifests, "Notes", "notes")["text"]
    services = {service["metadata"]["name"]: service for service in of_kind(manifests, "Service")}
    for line in notes.splitlines():
        if "port-forward" in line:
            name, _, ports = line.partition("svc/")[2].partition(" ")
            port = int(ports.split()[0].split(":")[1])
            assert port in {one["port"] for one in services[name]["spec"]["ports"]}
    (config,) = [found for found in of_kind(manifests, "ConfigMap") if found["metadata"]["name"].endswith("-router")]
    router = yaml.safe_load(config["data"]["config.yaml"])
    assert f'"model": "{router["served_model_name"][0]}"' in notes
    for entry in router["drafters"]:
        assert entry.partition("=")[0] in notes
    assert ("Authorization" in notes) == ("api_keys_file" in router)
    assert ("recorded in each router's memory only" in notes) == ("MOOT_REDIS_URL" not in str(manifests))
