"""`moot demo` and `moot serve` as a newcomer runs them: real processes, a tiny model, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moot.client import Client, RequestFailed, StreamedAnswer
from moot.testing.tiny_model import make_tiny_model
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

FLAGS = (
    *("--drafters", "suffix,prompt_lookup,ngram", "--num-threads", "1"),
    *("--dtype", "float32", "--stop-grace-s", "20"),
)
DEADLINE_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def environ(cache: Path, **settings: str) -> dict[str, str]:
    return {**os.environ, "MOOT_CACHE": str(cache), **settings}


def moot(*arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    command = [sys.executable, "-m", "moot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=check, **options)


def processes_of(cache: Path) -> list[int]:
    """Living processes that were started with this cache folder: the command's children, grandchildren included."""
    mark = f"MOOT_CACHE={cache}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_the_demo_compares_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """Exit status 0 says that the texts are identical, id by id; the table and the samples say how fast they came."""
    samples_file = tmp_path / "samples.json"
    flags = ("--model", str(model), "--max-tokens", "24", "--repetitions", "2", "--prompt", "abc abc abc")
    bounds = ("--num-speculative-tokens", "3")
    writes = ("--json-file", str(samples_file))
    done = moot("demo", *FLAGS, *flags, *bounds, *writes, check=False, env=environ(tmp_path))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "texts identical: yes" in done.stdout
    assert re.search(r"^yours +24 ", done.stdout, re.MULTILINE)
    assert "1/2 yours" in done.stderr
    samples = json.loads(samples_file.read_text())
    assert [sample["drafting"] for sample in samples] == [True, False, False, True]
    assert len({tuple(sample["token_ids"]) for sample in samples}) == 1
    for sample in samples:
        # Each round gives one token of the target's own, the opening the first; the rest was drafted and accepted.
        assert len(sample["token_ids"]) <= 1 + sample["num_rounds"] + sample["num_accepted_tokens"]
        assert bool(sample["num_draft_tokens"]) == sample["drafting"]
        assert sample["num_accepted_tokens"] <= sample["num_draft_tokens"]
    assert processes_of(tmp_path) == []


@contextmanager
def served(model: Path, cache: Path, **settings: str) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """The command, the URL that it printed, and its folder of logs. `settings`: further environment variables."""
    command = [
        sys.executable,
        "-m",
        "moot",
        "serve",
        *FLAGS,
        "--drafter-processes",
        "--model",
        str(model),
        "--port",
        "0",
    ]
    with (cache / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environ(cache, **settings),
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        shown = ""
        while "Ctrl-C" not in shown:
            line = process.stdout.readline()
            assert line, (cache / "stderr").read_text()
            shown += line
        url = re.search(r"http://127\.0\.0\.1:\d+", shown)
        assert url is not None
        yield process, url.group(), next((cache / "run").iterdir())
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ask(url: str, drafting: bool = True) -> StreamedAnswer:
    body = {
        "messages": [{"role": "user", "content": "abc abc abc"}],
        "temperature": 0,
        "max_tokens": 16,
        "return_token_ids": True,
        "include_metrics": True,
        "num_speculative_tokens": 3 if drafting else 0,
    }
    answer = StreamedAnswer()
    for _ in Client(url).stream_chat(body, answer):
        pass
    return answer


def test_serve_goes_on_without_a_drafter_and_ends_on_ctrl_c(model: Path, tmp_path: Path) -> None:
    """A lost drafter is said and changes no text; Ctrl-C ends every process."""
    with served(model, tmp_path) as (process, url, logs):
        assert "moot_state_store_up 1.0" in Client(url).get("/metrics").decode(), "requests are recorded"
        before = ask(url)
        assert len(before.token_ids) > 0
        os.kill(json.loads((logs / "drafter-suffix.ready").read_text())["pid"], signal.SIGKILL)
        assert ask(url).token_ids == before.token_ids == ask(url, drafting=False).token_ids
        until(lambda: "drafter-suffix ended with status -9" in (tmp_path / "stderr").read_text(), "the loss is said")
        shown = moot("drafters", "--url", url)
        assert re.search(r"^ngram +\d+", shown.stdout, re.MULTILINE), shown.stdout
        said = "abc\n/metrics\nabc\n/quit\n"
        chat = moot("chat", "--url", url, "--max-tokens", "8", "--seed", "1", input=said)
        assert len(re.findall(r"\[\d+ rounds", chat.stderr)) == 1, chat.stderr
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    assert processes_of(tmp_path) == []


def test_serve_ends_when_an_essential_part_does(model: Path, tmp_path: Path) -> None:
    """Without its verifier there is nothing to serve: exit status 1, and the reason. Until then the environment set
    it as flags do: the key is asked of every caller and stands in no command line; no store was started."""
    settings = {"MOOT_API_KEY": "canary-key", "MOOT_REDIS_URL": "off", "MOOT_MODEL": "/nowhere"}
    with served(model, tmp_path, **settings) as (process, url, logs):
        with pytest.raises(RequestFailed, match="HTTP 401"):
            Client(url).models()
        assert Client(url, "canary-key").models() == ["tiny"]
        assert "moot_state_store_up 1.0" not in Client(url, "canary-key").get("/metrics").decode()
        for pid in processes_of(tmp_path):
            assert b"canary-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        listed = moot("drafters", "--url", url, "--api-key", "canary-key")
        assert f"Drafters of {url}" in listed.stdout
        os.kill(json.loads((logs / "verifier.ready").read_text())["pid"], signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert process.returncode == 1
    assert "verifier ended with status -9" in (tmp_path / "stderr").read_text()
    assert processes_of(tmp_path) == []
