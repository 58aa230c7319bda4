"""What a request leaves behind in the processes: nothing that a metric can see, however it ended."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Ask
from tests.integration.shared_systems import FIXED
from tests.integration.whole_system import System, running

NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def varied(systems_folder: Path) -> Iterator[System]:
    model = make_tiny_model(systems_folder / "memory-model")
    with running(
        systems_folder / "memory-logs",
        model,
        drafters=("suffix", "recycling"),
        store=True,
        router_flags=("--in-process-drafters", "prompt_lookup", *FIXED),
    ) as system:
        yield system


def _request(system: System, number: int) -> str:
    """Sends the request of this number; how it ended."""
    body: dict[str, Any] = {"model": "tiny", "prompt": f"number {number} " * (1 + number % 30), "max_tokens": 8}
    sorts: list[dict[str, Any]] = [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 1.0, "seed": number, "n": 3},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.8, "seed": number, "stop": ["e", "a"]},
        {"temperature": -1},
        {"max_tokens": 1000, "ignore_eos": True},
        {"num_speculative_tokens": 0},
    ]
    sort = number % len(sorts)
    ask = Ask(system.router.port, body | sorts[sort], stream=sort != 2)
    if sort == 5:
        ask.wait_tokens(2)
        ask.give_up()
        return "given up"
    reply = ask.result()
    return "refused" if reply.status == 400 else "whole" if reply.is_complete else f"{reply}"


def test_nothing_is_held_after_many_varied_requests(varied: System) -> None:
    """Sessions of verifier and drafters, KV, places in the pool and running requests all go back to zero after requests
    that ended, were refused, were stopped by their text or lost their caller."""
    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(lambda number: _request(varied, number), range(NUM_REQUESTS)))
    assert set(outcomes) == {"whole", "refused", "given up"}
    varied.assert_idle()
    assert varied.verifiers[0].metric("moot_forward_seconds_count") > 0
