"""The init container's script against a hub of our own: whole and checked, or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deploy.charts import CHART

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
    """As much of a hub's API as a download of a repository needs."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.broken: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                hub.tokens.add(self.headers.get("Authorization"))
                path = self.path.partition("?")[0]
                headers = {}
                if path.startswith("/api/models/org/model"):
                    siblings = [{"rfilename": name} for name in FILES]
                    files = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in FILES.items()]
                    whole = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
                    body = json.dumps(files if "/tree/" in path else whole).encode()
                else:
                    name = path.rpartition("/")[2]
                    body = FILES[name]
                    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
                    if name in hub.broken and with_body:
                        self.send_response(500)
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                self.send_response(200)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def fetch(hub: Hub, folder: Path, home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--repository=org/model", f"--folder={folder}", "--timeout-s=60", *arguments],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            **{"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub"), "HOME": str(home), "HF_HUB_DISABLE_XET": "1"},
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def sha256(name: str) -> str:
    return f"--sha256={name}={hashlib.sha256(FILES[name]).hexdigest()}"


def test_a_model_is_fetched_once_and_whole(hub: Hub, tmp_path: Path) -> None:
    """Weights, configuration and tokenizer, never code or pickled weights; the second start asks nobody."""
    folder = tmp_path / "models" / "main" / "model"
    token = tmp_path / "token"
    token.write_text("hub-secret")
    done = fetch(hub, folder, tmp_path, f"--revision={COMMIT}", HF_TOKEN_PATH=str(token))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} - {".fetched.json"} == SAFE
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "Bearer hub-secret" in hub.tokens
    assert "hub-secret" not in done.stdout + done.stderr
    asked = len(hub.requests)
    again = fetch(hub, folder, tmp_path, f"--revision={COMMIT}")
    assert again.returncode == 0
    assert len(hub.requests) == asked
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "something was left beside it"


def test_a_router_fetches_no_weights(hub: Hub, tmp_path: Path) -> None:
    """All that a tokenizer needs, and not the large rest."""
    folder = tmp_path / "models" / "model"
    assert fetch(hub, folder, tmp_path, "--without-weights").returncode == 0
    assert {path.name for path in folder.iterdir()} - {".fetched.json"} == SAFE - {"model.safetensors"}
    assert not any("model.safetensors" in request for request in hub.requests)


def test_right_checksums_are_taken(hub: Hub, tmp_path: Path) -> None:
    """Every file that is named has the bytes that it should have."""
    folder = tmp_path / "models" / "model"
    done = fetch(hub, folder, tmp_path, sha256("model.safetensors"), sha256("config.json"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"--sha256=model.safetensors={'0' * 64}"], "model.safetensors: sha256 is"),
        ([sha256("config.json")], "weights without a checksum: model.safetensors"),
        ([sha256("model.safetensors"), f"--sha256=absent.json={'0' * 64}"], "absent.json has a checksum, and is not"),
    ],
)
def test_what_is_not_as_it_should_be_is_not_published(
    hub: Hub, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """A wrong digest, weights that nobody named, a missing file: the pod does not start, and nothing is left."""
    folder = tmp_path / "models" / "model"
    done = fetch(hub, folder, tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(folder.parent.iterdir()) == []


def test_a_broken_download_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    """Half a model is never taken for one."""
    hub.broken = {"model.safetensors"}
    folder = tmp_path / "models" / "model"
    done = fetch(hub, folder, tmp_path)
    assert done.returncode != 0
    assert list(folder.parent.iterdir()) == []
    hub.broken = set()
    assert fetch(hub, folder, tmp_path).returncode == 0


def test_another_revision_replaces_what_is_there(hub: Hub, tmp_path: Path) -> None:
    """A folder of other contents is not taken for the one asked for."""
    folder = tmp_path / "models" / "model"
    assert fetch(hub, folder, tmp_path).returncode == 0
    assert fetch(hub, folder, tmp_path, sha256("model.safetensors")).returncode == 0
    assert json.loads((folder / ".fetched.json").read_text())["sha256"] != {}


def test_pods_that_share_a_volume_fetch_at_once(hub: Hub, tmp_path: Path) -> None:
    """Several init containers at the same time: all succeed, one folder, nothing beside it."""
    folder = tmp_path / "models" / "model"
    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda index: fetch(hub, folder, tmp_path / str(index)), range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
