"""The files that the chart writes, read by the real programs on loopback; and the script of `helm test` asks them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moot.runtime.supervisor import Child, Supervisor
from moot.testing.tiny_model import make_tiny_model
from tests.deploy.charts import CHART, PodTemplate, given, render
from tests.programs import run
from tests.waiting import GIVE_UP_S

KEY = "a-key-of-the-test"
VALUES = given(
    "model: {name: tiny, source: volume, storage: {existingClaim: models}},"
    "verifier: {device: cpu, config: {kvCapacityTokens: 4096, prefixCacheTokens: 1024}},"
    "drafters.suffix.kind: suffix, router.config.inProcessDrafters: [prompt_lookup], auth.existingSecret: keys"
)


def start(supervisor: Supervisor, folder: Path, pod: PodTemplate, *flags: str) -> Child:
    """One rendered program as a process, with its rendered file; ports and paths of this machine by flags."""
    assert pod.container["args"] == ["--config=/etc/moot/config/config.yaml"]
    config = folder / f"{pod.component}.yaml"
    config.write_text(pod.file)
    own = (f"--config={config}", "--host=127.0.0.1", "--port=0", "--metrics-port=0")
    environ = {name: variable["value"] for name, variable in pod.env.items()}
    environ |= {"HOME": str(folder), "HF_HOME": str(folder)}
    return supervisor.service(pod.component, pod.role, [*own, *flags], environ=environ)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a rendered router with a verifier and a drafter, which end by themselves when they are told to."""
    folder = tmp_path_factory.mktemp("programs")
    model = make_tiny_model(folder / "tiny")
    hashes = folder / "hashes"
    hashes.write_text(hashlib.sha256(KEY.encode()).hexdigest() + "\n")
    release = render(VALUES)
    with Supervisor(folder, grace_s=60) as supervisor:
        verifier = start(supervisor, folder, release.pod("verifier"), f"--model={model}")
        suffix = start(supervisor, folder, release.pod("drafter-suffix"), f"--tokenizer={model}")
        supervisor.wait_ready([verifier, suffix], GIVE_UP_S)
        peers = (f"--verifiers=127.0.0.1:{verifier.port}", f"--drafters=suffix=127.0.0.1:{suffix.port}")
        own = (f"--model={model}", "--grpc-port=0", f"--api-keys-file={hashes}")
        router = start(supervisor, folder, release.pod("router"), *own, *peers)
        supervisor.wait_ready([router], GIVE_UP_S)
        yield f"http://127.0.0.1:{router.port}"
    assert [child.status for child in (router, verifier, suffix)] == [0, 0, 0], "a program did not drain"


@pytest.fixture
def key(tmp_path: Path) -> str:
    """The flag that names a file with the caller's key."""
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    return f"--key-file={path}"


def ask(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, CHART / "files" / "ask.py", f"--url={url}", "--timeout-s=60", *flags)


def test_a_completion_is_streamed(url: str, key: str) -> None:
    """Rendered router, verifier and drafter answer whoever has a key, and nobody else."""
    done = ask(url, "--model=tiny", "--guarded", key)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: ")


def test_without_a_key_strangers_are_refused(url: str) -> None:
    """The test pod that has no key says what it could test, and does not fail for it."""
    done = ask(url, "--model=tiny", "--guarded")
    assert done.returncode == 0, done.stderr
    assert "strangers are refused" in done.stdout


@pytest.mark.parametrize(
    ("model", "has_key", "message"), [("tiny", False, "status 401"), ("other", True, "status 404")]
)
def test_what_is_wrong_fails_the_test_pod(url: str, key: str, model: str, has_key: bool, message: str) -> None:
    """A caller that is refused, a model that is not served: `helm test` fails, and says why."""
    done = ask(url, f"--model={model}", *[key] * has_key)
    assert done.returncode == 1
    assert message in done.stderr
