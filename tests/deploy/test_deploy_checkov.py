"""What checkov finds in the rendered scenarios and the Dockerfiles: nothing, but for exceptions that have a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import CONFIGS, ROOT, SCENARIOS, rendered, tool
from tests.programs import output, run

IN_CLUSTER = {
    "CKV_K8S_11": (".*", "a CPU limit throttles a latency-bound step in the middle; requests set the share instead"),
    "CKV_K8S_15": (".*", "tags are versions and never move; operators who want it set pullPolicy or a digest"),
    "CKV_K8S_43": (".*", "digests are the operator's: image.digest of each role"),
    "CKV_K8S_38": (".*-router$", "the router watches EndpointSlices; its Role allows that and nothing else"),
    "CKV_K8S_35": (".*-router$", "the store's URL with its password is read from the environment only"),
    "CKV_K8S_8": (".*-test$", "the pod of `helm test` runs once and ends"),
    "CKV_K8S_9": (".*-test$", "the pod of `helm test` runs once and ends"),
}
IN_IMAGES = {
    "CKV_DOCKER_2": (".*", "Kubernetes ignores HEALTHCHECK; the chart and docker-compose.yml have probes"),
}


def findings(arguments: list[str], framework: str, folder: Path) -> list[tuple[str, str]]:
    """Check and resource of everything that fails."""
    quiet = ["--compact", "--quiet", "--skip-download", "-o", "json"]
    done = run(tool("venv/bin/checkov"), *arguments, "--framework", framework, *quiet, cwd=folder, timeout_s=200)
    report: Any = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 0
    return [(one["check_id"], one["resource"]) for one in report["results"]["failed_checks"]]


def unexplained(found: list[tuple[str, str]], allowed: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (check, resource)
        for check, resource in found
        if check not in allowed or not re.fullmatch(allowed[check][0], resource)
    ]


def test_rendered_objects_have_no_unexplained_findings(tmp_path: Path) -> None:
    """Every finding in any scenario is an exception of the table, and every exception is needed."""
    for scenario in SCENARIOS:
        (tmp_path / f"{scenario}.yaml").write_text(yaml.safe_dump_all(rendered(scenario).objects))
    found = findings(["-d", "."], "kubernetes", tmp_path)
    assert unexplained(found, IN_CLUSTER) == []
    assert {check for check, _ in found} == set(IN_CLUSTER)


def test_dockerfiles_have_no_unexplained_findings() -> None:
    """The same for the images."""
    files = [part for service in CONFIGS for part in ("-f", f"services/{service}/Dockerfile")]
    found = findings(files, "dockerfile", ROOT)
    assert unexplained(found, IN_IMAGES) == []
    assert {check for check, _ in found} == set(IN_IMAGES)


@pytest.mark.parametrize("service", CONFIGS)
def test_dockerfiles_pass_hadolint(service: str) -> None:
    """Exceptions stand in the Dockerfile, each with its reason."""
    assert output(tool("venv/bin/hadolint"), f"services/{service}/Dockerfile", cwd=ROOT) == ""


def test_images_have_the_torch_that_was_checked() -> None:
    """The version that images are built with is the Makefile's, inside what pyproject.toml allows."""
    (wanted,) = re.findall(r"^TORCH := torch==(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"${{TORCH_VERSION:-{wanted}}}" in (ROOT / "deploy" / "docker" / "install.sh").read_text()


def test_build_stages_are_alike() -> None:
    """What images are built by is written once: the Dockerfiles differ in extras and torch alone."""
    stages = set()
    for service in CONFIGS:
        text = (ROOT / "services" / service / "Dockerfile").read_text()
        stage = text.partition("AS build\n")[2].partition("\nFROM")[0]
        stage = re.sub(r"(?<=install.sh requirements ).*", "EXTRAS", stage)
        stages.add(stage.replace("ARG TORCH=cuda TORCH_VERSION TORCH_CPU_INDEX\n", ""))
    assert len(stages) == 1
