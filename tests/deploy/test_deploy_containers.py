"""The rendered pods run for real: containers from the project's Dockerfiles, with what the chart wrote.

Needs an engine and images: tests/deploy/run_containers.sh. Not run elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.deploy.charts import render, scenario_values
from tests.deploy.containers import NETWORK, Pod, assert_kernels, docker, needs_engine
from tests.waiting import until

pytestmark = [pytest.mark.timeout(600), needs_engine]


DRAFTERS = ("suffix", "lookup", "neural")


def remove_leftovers() -> None:
    """Of this run, or of one that was killed."""
    left = docker("ps", "--all", "--quiet", "--filter", f"name=^{NETWORK}-").split()
    if left:
        docker("rm", "--force", "--volumes", *left)
    docker("network", "rm", NETWORK, check=False)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    """The minimal scenario's pods, started in the order that no cluster promises: routers first."""
    folder = tmp_path_factory.mktemp("pods")
    folder.chmod(0o755)
    models = folder / "models"
    # Heads as wide as kernels want them.
    make_tiny_model(models / "tiny", hidden=128)
    make_tiny_model(models / "draft", hidden=128, layers=1)
    values = scenario_values("minimal-cpu")
    # No hub, no API server and no kube-proxy here: models lie on a volume, pods are found by DNS, and a Service's port
    # is the pod's. One pool with a draft model, which has an image of its own.
    values["drafters"]["neural"] = {"kind": "neural", "model": "draft", "device": "cpu"}
    values |= {
        "model": {"name": "tiny", "source": "volume", "storage": {"existingClaim": "models"}},
        "discovery": {"mode": "dns"},
        "router": {**values["router"], "service": {"httpPort": 8000}},
    }
    release = render(values)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    remove_leftovers()
    docker("network", "create", NETWORK)
    running: dict[str, Pod] = {}
    try:
        for template in sorted(release.pods, key=lambda template: template.role != "router"):
            if template.component != "test":
                running[template.component] = Pod(template, release, folder, models)
        for probe in ("startupProbe", "readinessProbe"):
            for pod in running.values():
                pod.await_probe(probe)
        running["test"] = Pod(release.pod("test"), release, folder, models)
        yield running
    finally:
        remove_leftovers()


def ask(pods: dict[str, Pod], **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion."""
    body = {"model": "tiny", "prompt": "one two three one two three one two", "max_tokens": 48, "temperature": 0}
    url = f"http://{pods['router'].address}:8000/v1/completions"
    answer = httpx.post(url, json={**body, "stream": True, "include_metrics": True, **fields}, timeout=60)
    events = [line[6:] for line in answer.raise_for_status().text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_the_rendered_system_answers(pods: dict[str, Pod]) -> None:
    """A streamed completion through router, drafters and verifier: the same text with drafting and without."""
    drafted = ask(pods)
    assert text(drafted)
    assert text(ask(pods, num_speculative_tokens=0)) == text(drafted)
    # Drafters are asked as soon as the router has heard what they are.
    proposed: set[str] = set()

    def all_proposed() -> bool:
        last = ask(pods, num_speculative_tokens=4, drafters=list(DRAFTERS))[-1]
        proposed.update(last["metrics"]["speculative_decoding"]["drafters"])
        return proposed >= set(DRAFTERS)

    until(all_proposed, "every drafter proposes")


@pytest.mark.parametrize("component", ["verifier", "drafter-neural"])
def test_models_are_computed_by_compiled_kernels(pods: dict[str, Pod], component: str) -> None:
    """On a read-only file system and without a compiler: by the kernels of the image, where this CPU may run them."""
    assert_kernels(pods[component].name, pods[component].logs())


def test_the_pod_of_helm_test_is_content(pods: dict[str, Pod]) -> None:
    """`helm test` on this system: its pod ends with 0."""
    assert docker("wait", pods["test"].name, timeout_s=180) == "0", pods["test"].logs()


def test_records_are_in_the_store(pods: dict[str, Pod]) -> None:
    """The router found the store that the chart rendered: it is durable, and holds keys of this release."""
    ask(pods)
    assert "moot_state_store_up 1.0" in httpx.get(f"http://{pods['router'].address}:8002/metrics", timeout=5).text
    keys = docker("exec", pods["redis"].name, "redis-cli", "--scan").split()
    assert keys
    assert all(key.startswith("demo") for key in keys), keys[:5]


def test_pods_end_within_their_grace(pods: dict[str, Pod]) -> None:
    """SIGTERM: every program drains and ends by itself with status 0, before SIGKILL would come."""
    for component in ("router", *(f"drafter-{name}" for name in DRAFTERS), "verifier", "redis"):
        pod = pods[component]
        started = time.monotonic()
        docker("stop", "--time", str(pod.grace_s), pod.name, timeout_s=pod.grace_s + 30)
        assert pod.status == "exited 0", f"{component}: {pod.status}: {pod.logs()}"
        assert time.monotonic() - started < pod.grace_s, component
