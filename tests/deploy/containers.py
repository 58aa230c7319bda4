"""Pods of rendered manifests as containers of a real engine, which tests/deploy/setup_engine.sh starts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from moot.model.decoder.kernels.library import CPU_FLAGS
from moot.model.rows import cpu_flags
from tests.deploy.charts import NAMESPACE, Manifest, of_kind, one
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
    done = subprocess.run(
        [DOCKER, *arguments],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0 or not check, f"docker {arguments[0]}: {done.stdout}"
    return done.stdout.strip()


def logged(text: str, message: str) -> list[dict[str, Any]]:
    """The log lines that say `message`."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["message"] == message]


def assert_kernels(container: str, logs: str) -> None:
    """The image brings its kernels, no compiler, and computes with them where the CPU has what they use."""
    find = (
        "from moot.model.decoder.kernels.library import SOURCE, source_digest;"
        "print(SOURCE.with_name(f'kernels-{source_digest()}.so').read_bytes()[:4])"
    )
    assert "ELF" in docker("exec", container, "python", "-c", find)
    assert docker("exec", container, "sh", "-c", "command -v gcc || echo none") == "none"
    (line,) = logged(logs, "model is ready to compute")
    assert ("kernels" in line["computed_by"]) == (cpu_flags() >= CPU_FLAGS), line


class Pod:
    """One container of a rendered pod, with its mounts, environment, confinement and probes."""

    def __init__(self, pod: Manifest, manifests: tuple[Manifest, ...], folder: Path, models: Path) -> None:
        self.component = str(pod["metadata"]["labels"]["app.kubernetes.io/component"])
        self.name = f"{NETWORK}-{self.component}"
        (self.container,) = pod["spec"]["containers"]
        self.grace_s = int(pod["spec"].get("terminationGracePeriodSeconds", 30))
        context = pod["spec"]["securityContext"]
        arguments = ["--name", self.name, "--network", NETWORK, "--read-only", "--cap-drop", "ALL"]
        arguments += [
            "--security-opt",
            "no-new-privileges",
            "--user",
            f"{context['runAsUser']}:{context['runAsGroup']}",
        ]
        for service in of_kind(manifests, "Service"):
            if service["spec"]["selector"]["app.kubernetes.io/component"] == self.component:
                for alias in ("{}.{}.svc.cluster.local", "{}.{}.svc"):
                    arguments += ["--network-alias", alias.format(service["metadata"]["name"], NAMESPACE)]
        for variable in self.container.get("env", []):
            arguments += ["--env", f"{variable['name']}={variable['value']}"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for mount in self.container["volumeMounts"]:
            volume, where = volumes[mount["name"]], mount["mountPath"]
            if "configMap" in volume:
                files = folder / self.component / mount["name"]
                files.mkdir(parents=True)
                for file, text in one(manifests, "ConfigMap", volume["configMap"]["name"])["data"].items():
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
            done = subprocess.run(
                [DOCKER, "exec", self.name, *probe["exec"]["command"]],
                env=ENVIRON,
                capture_output=True,
                timeout=30,
                check=False,
            )
            return done.returncode == 0
        return True

    def await_probe(self, which: str) -> None:
        until(lambda: self.probe(which) or not self.status.startswith("running"), f"{which} of {self.name}", poll_s=0.2)
        assert self.status.startswith("running"), f"{self.name} ended: {self.logs()}"
