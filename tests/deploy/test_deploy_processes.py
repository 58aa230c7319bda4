"""The files that the chart writes, read by the real programs on loopback; and the script of `helm test` asks them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.deploy.charts import CHART, Manifest, one, pod_templates, render
from tests.waiting import until

KEY = "a-key-of-the-test"
VALUES = {
    "model": {"name": "tiny", "source": "volume", "storage": {"existingClaim": "models"}},
    "verifier": {"device": "cpu", "config": {"kvCapacityTokens": 4096, "prefixCacheTokens": 1024}},
    "drafters": {"suffix": {"kind": "suffix"}},
    "router": {"config": {"inProcessDrafters": ["prompt_lookup"]}},
    "auth": {"existingSecret": "keys"},
}


class Program:
    """One rendered program as a process, with its rendered file; ports and paths of this machine by flags."""

    def __init__(self, folder: Path, manifests: tuple[Manifest, ...], component: str, *flags: str) -> None:
        (pod,) = [pod for name, pod in pod_templates(manifests) if name.endswith(f"-{component}")]
        container = pod["spec"]["containers"][0]
        (argument,) = container["args"]
        assert argument == "--config=/etc/moot/config/config.yaml"
        config = folder / f"{component}.yaml"
        config.write_text(one(manifests, "ConfigMap", f"demo-moot-{component}")["data"]["config.yaml"])
        self._ready = folder / f"{component}.ready"
        self._log = folder / f"{component}.log"
        own = [f"--config={config}", "--host=127.0.0.1", "--port=0", "--metrics-port=0", f"--ready-file={self._ready}"]
        environ = {variable["name"]: variable["value"] for variable in container["env"]}
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"services.{component.partition('-')[0]}", *own, *flags],
            env={**os.environ, **environ, "HOME": str(folder), "HF_HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stderr=self._log.open("w"),
        )

    @property
    def port(self) -> int:
        until(lambda: self._ready.exists() or self.process.poll() is not None, "it is ready")
        assert self.process.poll() is None, self._log.read_text()
        return int(json.loads(self._ready.read_text())["port"])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("programs")
    model = make_tiny_model(folder / "tiny")
    hashes = folder / "hashes"
    hashes.write_text(hashlib.sha256(KEY.encode()).hexdigest() + "\n")
    manifests = render(VALUES)
    verifier = Program(folder, manifests, "verifier", f"--model={model}")
    suffix = Program(folder, manifests, "drafter-suffix", f"--tokenizer={model}")
    started = [verifier, suffix]
    try:
        peers = (f"--verifiers=127.0.0.1:{verifier.port}", f"--drafters=suffix=127.0.0.1:{suffix.port}")
        made = Program(
            *(folder, manifests, "router", f"--model={model}", "--grpc-port=0", f"--api-keys-file={hashes}"), *peers
        )
        started.insert(0, made)
        assert made.port
        yield made
        assert [program.stop() for program in started] == [0, 0, 0], "a program did not drain"
    finally:
        for program in started:
            program.process.kill()
            program.process.wait()


def ask(router: Program, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CHART / "files" / "ask.py", f"--url=http://127.0.0.1:{router.port}", "--timeout-s=60"]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=90, check=False)


def test_a_completion_is_streamed(router: Program, tmp_path: Path) -> None:
    """Rendered router, verifier and drafter answer whoever has a key, and nobody else."""
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    done = ask(router, "--model=tiny", "--guarded", f"--key-file={key}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: ")


def test_without_a_key_strangers_are_refused(router: Program) -> None:
    """The test pod that has no key says what it could test, and does not fail for it."""
    done = ask(router, "--model=tiny", "--guarded")
    assert done.returncode == 0, done.stderr
    assert "strangers are refused" in done.stdout


@pytest.mark.parametrize(("flags", "message"), [(["--model=tiny"], "status 401"), (["--model=other"], "status 404")])
def test_what_is_wrong_fails_the_test_pod(router: Program, tmp_path: Path, flags: list[str], message: str) -> None:
    """A caller that is refused, a model that is not served: `helm test` fails, and says why."""
    key = tmp_path / "key"
    key.write_text(KEY)
    done = ask(router, *flags, *([f"--key-file={key}"] if "404" in message else []))
    assert done.returncode == 1
    assert message in done.stderr
