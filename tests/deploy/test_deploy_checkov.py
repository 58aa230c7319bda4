"""What checkov finds in the rendered scenarios and the Dockerfiles: nothing, but for exceptions that have a reason."""

from __future__ import annotations

import json
import re
import shutil
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


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What checkov says of all scenarios and Dockerfiles, by framework."""
    folder = tmp_path_factory.mktemp("checked")
    for scenario in SCENARIOS:
        (folder / f"{scenario}.yaml").write_text(yaml.dump_all(rendered(scenario).objects, Dumper=yaml.CSafeDumper))
    for service in CONFIGS:
        (folder / service).mkdir()
        shutil.copy(ROOT / "services" / service / "Dockerfile", folder / service)
    flags = ("--framework", "kubernetes", "dockerfile", "--compact", "--quiet", "--skip-download", "-o", "json")
    done = run(tool("venv/bin/checkov"), "-d", ".", *flags, cwd=folder, timeout_s=200)
    return {report["check_type"]: report for report in json.loads(done.stdout)}


@pytest.mark.parametrize(("framework", "allowed"), [("kubernetes", IN_CLUSTER), ("dockerfile", IN_IMAGES)])
def test_there_are_no_unexplained_findings(
    reports: dict[str, Any], framework: str, allowed: dict[str, tuple[str, str]]
) -> None:
    """Every finding in any scenario or image is an exception of the table, and every exception is needed."""
    report = reports[framework]
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 0
    found = [(one["check_id"], one["resource"]) for one in report["results"]["failed_checks"]]
    assert [one for one in found if one[0] not in allowed or not re.fullmatch(allowed[one[0]][0], one[1])] == []
    assert {check for check, _ in found} == set(allowed)


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
