"""The init container's script against a hub of our own: whole and checked, or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.answering import Answer, Request, answering
from tests.deploy.charts import CHART
from tests.programs import run

SCRIPT = CHART / "files" / "fetch_model.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "none"}',
    "model.safetensors": b"w" * 10_000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "modeling.py": b"raise SystemExit",
}
SAFE = {"config.json", "model.safetensors", "tokenizer.json"}


class Hub:
    """As much of a hub's API as a download of a repository needs. `broken`: files that it cannot send."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self.broken: set[str] = set()

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        path = request.path.partition("?")[0]
        if path.startswith("/api/models/org/model"):
            files = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in FILES.items()]
            whole = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return Answer(json.dumps(files if "/tree/" in path else whole).encode())
        name = path.rpartition("/")[2]
        if name in self.broken and request.method == "GET":
            return Answer(status=500)
        etag = f'"{hashlib.sha256(FILES[name]).hexdigest()}"'
        return Answer(FILES[name], headers={"X-Repo-Commit": COMMIT, "ETag": etag})


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    with answering(made.answer) as made.url:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the model is to lie."""
    return tmp_path / "models" / "model"


def fetch(hub: Hub, folder: Path, home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub"), "HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = (sys.executable, SCRIPT, "--repository=org/model", f"--folder={folder}", "--timeout-s=60")
    return run(*command, *arguments, env={**inherited, **own, **environ})


def sha256(name: str) -> str:
    return f"--sha256={name}={hashlib.sha256(FILES[name]).hexdigest()}"


def test_a_model_is_fetched_once_and_whole(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """Weights, configuration and tokenizer, never code or pickled weights; the second start asks nobody."""
    token = tmp_path / "token"
    token.write_text("hub-secret")
    done = fetch(hub, folder, tmp_path, f"--revision={COMMIT}", HF_TOKEN_PATH=str(token))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} - {".fetched.json"} == SAFE
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "Bearer hub-secret" in {request.headers.get("authorization") for request in hub.requests}
    assert "hub-secret" not in done.stdout + done.stderr
    asked = len(hub.requests)
    again = fetch(hub, folder, tmp_path, f"--revision={COMMIT}")
    assert again.returncode == 0
    assert len(hub.requests) == asked
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "something was left beside it"


def test_a_router_fetches_no_weights(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """All that a tokenizer needs, and not the large rest."""
    assert fetch(hub, folder, tmp_path, "--without-weights").returncode == 0
    assert {path.name for path in folder.iterdir()} - {".fetched.json"} == SAFE - {"model.safetensors"}
    assert not any("model.safetensors" in request.path for request in hub.requests)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"--sha256=model.safetensors={'0' * 64}"], "model.safetensors: sha256 is"),
        ([sha256("config.json")], "weights without a checksum: model.safetensors"),
        ([sha256("model.safetensors"), f"--sha256=absent.json={'0' * 64}"], "absent.json has a checksum, and is not"),
    ],
)
def test_what_is_not_as_it_should_be_is_not_published(
    hub: Hub, folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """A wrong digest, weights that nobody named, a missing file: the pod does not start, and nothing is left."""
    done = fetch(hub, folder, tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(folder.parent.iterdir()) == []


def test_a_broken_download_leaves_nothing(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """Half a model is never taken for one."""
    hub.broken = {"model.safetensors"}
    done = fetch(hub, folder, tmp_path)
    assert done.returncode != 0
    assert list(folder.parent.iterdir()) == []
    hub.broken = set()
    assert fetch(hub, folder, tmp_path).returncode == 0


def test_another_revision_replaces_what_is_there(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """A folder of other contents is not taken for the one asked for; every file that is named has its bytes."""
    assert fetch(hub, folder, tmp_path).returncode == 0
    done = fetch(hub, folder, tmp_path, sha256("model.safetensors"), sha256("config.json"))
    assert done.returncode == 0, done.stderr
    assert set(json.loads((folder / ".fetched.json").read_text())["sha256"]) == {"model.safetensors", "config.json"}


def test_pods_that_share_a_volume_fetch_at_once(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """Several init containers at the same time: all succeed, one folder, nothing beside it."""
    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda index: fetch(hub, folder, tmp_path / str(index)), range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
