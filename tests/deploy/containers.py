"""Pods of rendered manifests as containers of a real engine, which tests/deploy/setup_engine.sh starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from moot.model.decoder.kernels.library import VARIANTS, allowed_variant
from moot.model.rows import cpu_flags
from tests.deploy.charts import NAMESPACE, PodTemplate, Release
from tests.programs import run
from tests.waiting import until

DOCKER = "/usr/bin/docker"
ENVIRON = {**os.environ, "DOCKER_HOST": os.environ.get("DOCKER_HOST") or "unix:///tmp/moot-engine/docker.sock"}
NETWORK = "moot-test"

needs_engine = pytest.mark.skipif(
    not os.environ.get("MOOT_DEPLOY_CONTAINERS"),
    reason="containers are not run here: tests/deploy/run_containers.sh",
)


def docker(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> str:
    """What it prints, errors included where it logs."""
    done = run(DOCKER, *arguments, env=ENVIRON, timeout_s=timeout_s)
    printed = done.stdout + done.stderr
    assert done.returncode == 0 or not check, f"docker {arguments[0]}: {printed}"
    return printed.strip()


def logged(text: str, message: str) -> list[dict[str, Any]]:
    """The log lines that say `message`."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["message"] == message]


def assert_kernels(container: str, logs: str) -> None:
    """The image brings its kernels, no compiler, and computes with them where the CPU has what they use."""
    find = (
        "from moot.model.decoder.kernels.library import SOURCE, VARIANTS;"
        "print(*(SOURCE.with_name(each.file_name).read_bytes()[:4] for each in VARIANTS))"
    )
    assert docker("exec", container, "python", "-c", find).count("ELF") == len(VARIANTS)
    assert docker("exec", container, "sh", "-c", "command -v gcc || echo none") == "none"
    (line,) = logged(logs, "model is ready to compute")
    assert ("kernels" in line["computed_by"]) == (allowed_variant(cpu_flags()) is not None), line


class Pod:
    """One container of a rendered pod, with its mounts, environment, confinement and probes."""

    def __init__(self, template: PodTemplate, release: Release, folder: Path, models: Path) -> None:
        self.name = f"{NETWORK}-{template.component}"
        self.container = template.container
        self.grace_s = int(template.spec.get("terminationGracePeriodSeconds", 30))
        context = template.spec["securityContext"]
        user = f"{context['runAsUser']}:{context['runAsGroup']}"
        arguments = ["--name", self.name, "--network", NETWORK, "--user", user]
        arguments += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        for service in release.of_kind("Service"):
            if service["spec"]["selector"]["app.kubernetes.io/component"] == template.component:
                for alias in ("{}.{}.svc.cluster.local", "{}.{}.svc"):
                    arguments += ["--network-alias", alias.format(service["metadata"]["name"], NAMESPACE)]
        for name, variable in template.env.items():
            arguments += ["--env", f"{name}={variable['value']}"]
        for mount in self.container["volumeMounts"]:
            volume, where = template.volumes[mount["name"]], mount["mountPath"]
            if "configMap" in volume:
                files = folder / template.component / mount["name"]
                files.mkdir(parents=True)
                for file, text in release.by_name["ConfigMap", volume["configMap"]["name"]]["data"].items():
                    (files / file).write_text(text)
                arguments += ["--volume", f"{files}:{where}:ro"]
            elif "persistentVolumeClaim" in volume:
                assert mount["readOnly"]
                arguments += ["--volume", f"{models}:{where}:ro"]
            else:
                arguments += ["--tmpfs", f"{where}:uid={context['runAsUser']},gid={context['fsGroup']}"]
        command = [str(part) for part in self.container.get("command", [])]
        if command:
            arguments += ["--entrypoint", command[0]]
        docker("run", "--detach", *arguments, self.container["image"], *command[1:], *self.container.get("args", []))

    @property
    def address(self) -> str:
        networks = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", self.name))
        return str(networks[NETWORK]["IPAddress"])

    @property
    def status(self) -> str:
        return docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", self.name)

    def logs(self) -> str:
        return docker("logs", "--tail", "100", self.name, check=False)

    def probe(self, which: str) -> bool:
        """What the kubelet would find, asked as it would ask."""
        probe = self.container[which]
        if "httpGet" in probe:
            url = f"http://{self.address}:{probe['httpGet']['port']}{probe['httpGet']['path']}"
            try:
                return httpx.get(url, timeout=probe.get("timeoutSeconds", 1)).status_code == 200
            except httpx.TransportError:
                return False
        if "exec" in probe:
            return run(DOCKER, "exec", self.name, *probe["exec"]["command"], env=ENVIRON).returncode == 0
        return True

    def await_probe(self, which: str) -> None:
        until(lambda: self.probe(which) or not self.status.startswith("running"), f"{which} of {self.name}", poll_s=0.2)
        assert self.status.startswith("running"), f"{self.name} ended: {self.logs()}"
