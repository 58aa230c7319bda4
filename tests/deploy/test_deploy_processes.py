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
from tests.deploy.charts import CHART, PodTemplate, given, render
from tests.programs import run
from tests.waiting import until

KEY = "a-key-of-the-test"
VALUES = given(
    "model: {name: tiny, source: volume, storage: {existingClaim: models}},"
    "verifier: {device: cpu, config: {kvCapacityTokens: 4096, prefixCacheTokens: 1024}},"
    "drafters.suffix.kind: suffix, router.config.inProcessDrafters: [prompt_lookup], auth.existingSecret: keys"
)


class Program:
    """One rendered program as a process, with its rendered file; ports and paths of this machine by flags."""

    def __init__(self, folder: Path, pod: PodTemplate, *flags: str) -> None:
        assert pod.container["args"] == ["--config=/etc/moot/config/config.yaml"]
        config = folder / f"{pod.component}.yaml"
        config.write_text(pod.file)
        self._ready = folder / f"{pod.component}.ready"
        self._log = folder / f"{pod.component}.log"
        own = [f"--config={config}", "--host=127.0.0.1", "--port=0", "--metrics-port=0", f"--ready-file={self._ready}"]
        environ = {name: variable["value"] for name, variable in pod.env.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"services.{pod.role}", *own, *flags],
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
    release = render(VALUES)
    verifier = Program(folder, release.pod("verifier"), f"--model={model}")
    suffix = Program(folder, release.pod("drafter-suffix"), f"--tokenizer={model}")
    started = [verifier, suffix]
    try:
        peers = (f"--verifiers=127.0.0.1:{verifier.port}", f"--drafters=suffix=127.0.0.1:{suffix.port}")
        own = (f"--model={model}", "--grpc-port=0", f"--api-keys-file={hashes}")
        made = Program(folder, release.pod("router"), *own, *peers)
        started.insert(0, made)
        assert made.port
        yield made
        assert [program.stop() for program in started] == [0, 0, 0], "a program did not drain"
    finally:
        for program in started:
            program.process.kill()
            program.process.wait()


def ask(router: Program, *flags: str) -> subprocess.CompletedProcess[str]:
    url = f"--url=http://127.0.0.1:{router.port}"
    return run(sys.executable, CHART / "files" / "ask.py", url, "--timeout-s=60", *flags)


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
