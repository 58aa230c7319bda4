"""The drafter as a process: ready file, answers, metrics, SIGTERM, and clear errors at start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from moot.rpc.link import LinkConfig, open_channel
from tests.services.drafter.drafter_driver import Peer, open_command, propose_command
from tests.waiting import GIVE_UP_S

COMMAND = [sys.executable, "-m", "services.drafter"]


async def _ready(process: asyncio.subprocess.Process, path: Path) -> dict[str, int]:
    async with asyncio.timeout(GIVE_UP_S):
        while not path.exists():
            assert process.returncode is None, "the drafter ended"
            await asyncio.sleep(0.01)
    facts: dict[str, int] = json.loads(path.read_text())
    return facts


def test_a_process_serves_and_drains_on_sigterm(tmp_path: Path) -> None:
    """SIGTERM: peers are told, what is asked meanwhile is answered, and when they have left it ends with status 0."""

    async def main() -> None:
        ready = tmp_path / "ready.json"
        flags = ["--kind", "suffix", "--option", "vocab_size=50,min_match=1", "--port", "0", "--metrics-port", "0"]
        process = await asyncio.create_subprocess_exec(*COMMAND, *flags, "--ready-file", str(ready))
        try:
            facts = await _ready(process, ready)
            assert facts["pid"] == process.pid
            async with open_channel(f"127.0.0.1:{facts['port']}", LinkConfig()) as channel:
                peer = Peer(channel)
                assert await peer.ids(open_command(1, [1, 2, 3, 1]), propose_command(1, 4, (), 2)) == [[2, 3]]
                url = f"http://127.0.0.1:{facts['metrics_port']}/metrics"
                text = (await asyncio.to_thread(httpx.get, url, timeout=GIVE_UP_S)).text
                assert "moot_num_sessions 1.0" in text
                assert "moot_draft_seconds_count 1.0" in text
                process.send_signal(signal.SIGTERM)
                assert (await peer.answer()).WhichOneof("answer") == "drain"
                assert await peer.ids(propose_command(1, 5, [2], 1)) == [[3]]
                await peer.call.done_writing()
                assert await asyncio.wait_for(process.wait(), GIVE_UP_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(main())


def test_a_frozen_process_ends_on_sigterm(tmp_path: Path) -> None:
    """Fault points come from the environment; a frozen drafter answers nothing and still obeys SIGTERM."""

    async def main() -> None:
        ready = tmp_path / "ready.json"
        flags = ["--kind", "ngram", "--option", "vocab_size=50", "--port", "0", "--metrics-port", "0"]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *flags, "--ready-file", str(ready), "--drain-grace-s", "0.2",
            env={**os.environ, "MOOT_FAULTS": "drafter.propose=freeze@sick"},
        )  # fmt: skip
        try:
            facts = await _ready(process, ready)
            async with open_channel(f"127.0.0.1:{facts['port']}", LinkConfig()) as channel:
                peer = Peer(channel)
                assert await peer.ids(open_command(1, [1, 2, 1]), propose_command(1, 3, (), 1)) == [[2]]
                await peer.send(open_command(2, [1, 2, 1], request="sick"), propose_command(2, 3))
                process.send_signal(signal.SIGTERM)
                assert (await peer.answer()).WhichOneof("answer") == "drain"
                assert await asyncio.wait_for(process.wait(), GIVE_UP_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(main())


def test_errors_at_start_are_one_sentence() -> None:
    """A wrong kind ends with status 2 and names the known ones."""
    flags = ["--kind", "sufix", "--option", "vocab_size=50"]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown drafter kind sufix")
    assert done.stderr.count("\n") == 1
