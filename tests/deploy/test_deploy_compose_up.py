"""`docker compose up` for real, from the project's Dockerfiles; without Grafana, whose image cannot be made here.

Needs an engine and images: tests/deploy/run_containers.sh. Not run elsewhere.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.deploy.charts import ROOT, tool
from tests.deploy.containers import ENVIRON, assert_kernels, docker, needs_engine
from tests.programs import output
from tests.waiting import until

pytestmark = [pytest.mark.timeout(600), needs_engine]

PROJECT = "moot-compose-test"
LEFT_OUT = {"grafana"}


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """docker-compose.yml as it is, without Grafana, with a model that has been fetched already. Ports by name."""
    folder = tmp_path_factory.mktemp("compose")
    make_tiny_model(folder / "models" / "target", hidden=128)
    fetched = {"repository": "org/tiny", "revision": None, "sha256": {}}
    (folder / "models" / "target" / ".fetched.json").write_text(json.dumps(fetched))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    ports = {name: free_port() for name in ("HTTP", "GRPC", "PROMETHEUS", "GRAFANA")}
    environ = {**ENVIRON, "MOOT_MODELS": str(folder / "models"), "MOOT_MODEL": "org/tiny"}
    environ |= {f"MOOT_PORT_{name}": str(port) for name, port in ports.items()}

    def run(*arguments: str) -> str:
        compose = (tool("venv/bin/docker-compose"), "--project-name", PROJECT)
        return output(*compose, *arguments, cwd=ROOT, env=environ, timeout_s=300)

    services = sorted({*run("config", "--services").split()} - LEFT_OUT)
    assert {"router", "verifier", "drafter-suffix", "drafter-lookup", "redis", "prometheus"} <= {*services}
    try:
        # `model` ends when it has looked: Compose waits for those that stay.
        lasting = [service for service in services if service != "model"]
        run("up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "200", *lasting)
        yield ports
    finally:
        run("down", "--volumes", "--timeout", "40")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> Any:
    return httpx.get(url, timeout=10).raise_for_status().json()


def test_compose_answers_and_is_watched(compose: dict[str, int]) -> None:
    """`docker compose up`: a completion is streamed, and Prometheus scrapes every program and has the chart's rules."""
    body = {"model": "org/tiny", "prompt": "one two one two", "max_tokens": 16, "stream": True}
    answer = httpx.post(f"http://127.0.0.1:{compose['HTTP']}/v1/completions", json=body, timeout=60)
    assert answer.text.rstrip().endswith("data: [DONE]")
    prometheus = f"http://127.0.0.1:{compose['PROMETHEUS']}/api/v1"
    expected = {"router", "verifier", "drafter-suffix", "drafter-lookup"}

    def scraped() -> set[str]:
        found = get(f"{prometheus}/query?query=moot_build_info")["data"]["result"]
        return {one["metric"]["pod"] for one in found}

    until(lambda: scraped() == expected, "every pod is scraped", poll_s=1)
    groups = get(f"{prometheus}/rules")["data"]["groups"]
    assert groups
    assert all(rule["health"] != "err" for group in groups for rule in group["rules"])


def test_compose_computes_by_compiled_kernels(compose: dict[str, int]) -> None:
    """The verifier's image brings them: its container has no compiler, and can write nowhere."""
    verifier = f"{PROJECT}-verifier-1"
    assert_kernels(verifier, docker("logs", verifier))
