"""The drafter as a process: ready file, answers, metrics, SIGTERM, and clear errors at start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from moot.rpc.link import LinkConfig, open_channel
from tests.services.drafter.drafter_driver import Peer, open_command, propose_command
from tests.services.service_process import refusal_of, service_process

KIND = ("--kind", "suffix", "--option", "vocab_size=50,min_match=1")


async def test_a_process_serves_and_drains_on_sigterm(tmp_path: Path) -> None:
    """SIGTERM: peers are told, what is asked meanwhile is answered, and when they have left it ends with status 0."""
    with service_process(tmp_path, "drafter", *KIND) as process:
        assert process.child.facts["pid"] == process.child.process.pid
        async with open_channel(process.address, LinkConfig()) as channel:
            peer = Peer(channel)
            assert await peer.ids(open_command(1, [1, 2, 3, 1]), propose_command(1, 4, (), 2)) == [[2, 3]]
            assert process.metric("moot_num_sessions") == process.metric("moot_draft_seconds_count") == 1
            process.terminate()
            assert (await peer.answer()).WhichOneof("answer") == "drain"
            assert await peer.ids(propose_command(1, 5, [2], 1)) == [[3]]
            await peer.call.done_writing()
            assert await asyncio.to_thread(process.wait) == 0


async def test_a_frozen_process_ends_on_sigterm(tmp_path: Path) -> None:
    """Fault points come from the environment; a frozen drafter answers nothing and still obeys SIGTERM."""
    faults = "drafter.propose=freeze@sick"
    with service_process(tmp_path, "drafter", *KIND, "--drain-grace-s", "0.2", faults=faults) as process:
        async with open_channel(process.address, LinkConfig()) as channel:
            peer = Peer(channel)
            assert await peer.ids(open_command(1, [1, 2, 1]), propose_command(1, 3, (), 1)) == [[2]]
            await peer.send(open_command(2, [1, 2, 1], request="sick"), propose_command(2, 3))
            process.terminate()
            assert (await peer.answer()).WhichOneof("answer") == "drain"
            assert await asyncio.to_thread(process.wait) == 0


def test_errors_at_start_are_one_sentence() -> None:
    """A wrong kind ends with status 2 and names the known ones."""
    said = refusal_of("drafter", "--kind", "sufix", "--option", "vocab_size=50")
    assert said.startswith("error: unknown drafter kind sufix")
