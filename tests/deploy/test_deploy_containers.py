"""The rendered pods run for real: containers from the project's Dockerfiles, with what the chart wrote.

Needs an engine and images: tests/deploy/setup_engine.sh; then MOOT_DEPLOY_CONTAINERS=1. Not run elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import NAMESPACE, ROOT, Manifest, of_kind, one, pod_templates, render, scenario_file, tool

from moot.model.tiny import make_tiny_model

DOCKER = "/usr/bin/docker"
HOST = os.environ.get("DOCKER_HOST") or "unix:///tmp/moot-engine/docker.sock"
NETWORK = "moot-test"
START_S = 120.0

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("MOOT_DEPLOY_CONTAINERS"),
        reason="containers are not run here: tests/deploy/setup_engine.sh, then MOOT_DEPLOY_CONTAINERS=1",
    ),
]


def docker(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> str:
    done = subprocess.run(
        [DOCKER, *arguments],
        env={**os.environ, "DOCKER_HOST": HOST},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0 or not check, f"docker {arguments[0]}: {done.stderr}"
    return done.stdout.strip()


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
        done = subprocess.run(
            [DOCKER, "logs", "--tail", "40", self.name],
            env={**os.environ, "DOCKER_HOST": HOST},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout

    def probe(self, which: str) -> bool:
        """What the kubelet would find, asked as it would ask."""
        probe = self.container[which]
        if "httpGet" in probe:
            url = f"http://{self.address}:{probe['httpGet']['port']}{probe['httpGet']['path']}"
            try:
                with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False
        if "exec" in probe:
            done = subprocess.run(
                [DOCKER, "exec", self.name, *probe["exec"]["command"]],
                env={**os.environ, "DOCKER_HOST": HOST},
                capture_output=True,
                timeout=30,
                check=False,
            )
            return done.returncode == 0
        return True

    def await_probe(self, which: str) -> None:
        deadline = time.monotonic() + START_S
        while not self.probe(which):
            assert self.status.startswith("running"), f"{self.name} ended: {self.logs()}"
            assert time.monotonic() < deadline, f"{self.name}: no {which}: {self.logs()}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    """The minimal scenario's pods, started in the order that no cluster promises: routers first."""
    folder = tmp_path_factory.mktemp("pods")
    folder.chmod(0o755)
    models = folder / "models"
    make_tiny_model(models / "tiny")
    values: dict[str, Any] = yaml.safe_load(scenario_file("minimal-cpu").read_text())
    # No hub, no API server and no kube-proxy here: the model lies on a volume, pods are found by DNS, and a Service's
    # port is the pod's.
    values |= {
        "model": {"name": "tiny", "source": "volume", "storage": {"existingClaim": "models"}},
        "discovery": {"mode": "dns"},
        "router": {**values["router"], "service": {"httpPort": 8000}},
    }
    manifests = render(values)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    docker("network", "create", NETWORK)
    running: dict[str, Pod] = {}
    try:
        templates = dict(pod_templates(manifests))
        for name in sorted(templates, key=lambda name: "router" not in name):
            if "test" not in name:
                pod = Pod(templates[name], manifests, folder, models)
                running[pod.component] = pod
        for pod in running.values():
            pod.await_probe("startupProbe")
        for pod in running.values():
            pod.await_probe("readinessProbe")
        (name,) = [name for name in templates if "test" in name]
        running["test"] = Pod(templates[name], manifests, folder, models)
        yield running
    finally:
        with contextlib.suppress(AssertionError):
            docker("rm", "--force", *(pod.name for pod in running.values()), check=False)
            docker("network", "rm", NETWORK, check=False)


def ask(pods: dict[str, Pod], **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion."""
    body = {"model": "tiny", "prompt": "one two three one two three one two", "max_tokens": 48, "temperature": 0}
    request = urllib.request.Request(
        f"http://{pods['router'].address}:8000/v1/completions",
        json.dumps({**body, "stream": True, "include_metrics": True, **fields}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_the_rendered_system_answers(pods: dict[str, Pod]) -> None:
    """A streamed completion through router, drafters and verifier: the same text with drafting and without."""
    drafted = ask(pods)
    assert len(drafted) > 2
    assert text(drafted)
    assert text(ask(pods, num_speculative_tokens=0)) == text(drafted)
    # Drafters are asked as soon as the router has heard what they are.
    deadline = time.monotonic() + 30
    proposed: set[str] = set()
    while not proposed >= {"suffix", "lookup"}:
        assert time.monotonic() < deadline, proposed
        last = ask(pods, num_speculative_tokens=4, drafters=["suffix", "lookup"])[-1]
        proposed |= set(last["metrics"]["speculative_decoding"]["drafters"])


def test_the_pod_of_helm_test_is_content(pods: dict[str, Pod]) -> None:
    """`helm test` on this system: its pod ends with 0."""
    assert docker("wait", pods["test"].name, timeout_s=180) == "0", pods["test"].logs()


def test_records_are_in_the_store(pods: dict[str, Pod]) -> None:
    """The router found the store that the chart rendered: it is durable, and holds keys of this release."""
    ask(pods)
    with urllib.request.urlopen(f"http://{pods['router'].address}:8002/metrics", timeout=5) as answer:
        metrics = answer.read().decode()
    assert "moot_state_store_up 1.0" in metrics
    keys = docker("exec", pods["redis"].name, "redis-cli", "--scan").split()
    assert keys
    assert all(key.startswith("demo") for key in keys), keys[:5]


def test_pods_end_within_their_grace(pods: dict[str, Pod]) -> None:
    """SIGTERM: every program drains and ends by itself with status 0, before SIGKILL would come."""
    for component in ("router", "drafter-suffix", "drafter-lookup", "verifier", "redis"):
        pod = pods[component]
        started = time.monotonic()
        docker("stop", "--time", str(pod.grace_s), pod.name, timeout_s=pod.grace_s + 30)
        assert pod.status == "exited 0", f"{component}: {pod.status}: {pod.logs()}"
        assert time.monotonic() - started < pod.grace_s, component


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """docker-compose.yml as it is, without Grafana, with a model that has been fetched already. Ports by service."""
    folder = tmp_path_factory.mktemp("compose")
    make_tiny_model(folder / "models" / "target")
    fetched = {"repository": "org/tiny", "revision": None, "sha256": {}}
    (folder / "models" / "target" / ".fetched.json").write_text(json.dumps(fetched))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    ports = {name: free_port() for name in ("HTTP", "GRPC", "PROMETHEUS", "GRAFANA")}
    environ = {**os.environ, "DOCKER_HOST": HOST, "MOOT_MODELS": str(folder / "models"), "MOOT_MODEL": "org/tiny"}
    environ |= {f"MOOT_PORT_{name}": str(port) for name, port in ports.items()}

    def run(*arguments: str) -> None:
        command = [tool("venv/bin/docker-compose"), "--project-name", "moot-compose-test", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    services = ("router", "verifier", "drafter-suffix", "drafter-lookup", "redis", "prometheus")
    try:
        run("up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "200", *services)
        yield ports
    finally:
        run("down", "--volumes", "--timeout", "40")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def test_compose_answers_and_is_watched(compose: dict[str, int]) -> None:
    """`docker compose up`: a completion is streamed, and Prometheus scrapes every program and has the chart's rules."""
    body = {"model": "org/tiny", "prompt": "one two one two", "max_tokens": 16, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{compose['HTTP']}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read().decode().rstrip().endswith("data: [DONE]")
    prometheus = f"http://127.0.0.1:{compose['PROMETHEUS']}/api/v1"
    expected = {"router", "verifier", "drafter-suffix", "drafter-lookup"}
    deadline = time.monotonic() + 60
    while True:
        found = get(f"{prometheus}/query?query=moot_build_info")["data"]["result"]
        if {one["metric"]["pod"] for one in found} == expected:
            break
        assert time.monotonic() < deadline, found
        time.sleep(1)
    groups = get(f"{prometheus}/rules")["data"]["groups"]
    assert groups
    assert all(rule["health"] != "err" for group in groups for rule in group["rules"])
