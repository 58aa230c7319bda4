"""Heads inside real verifier processes behind a real router: voted on like any drafter, and no text depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape
from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Ask, assert_same, complete, plain
from tests.integration.whole_system import FIXED, System, running
from tests.waiting import until

FEW = [60, 61, 62, 63]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two verifiers with a head of random weights each; in the second one it fails whenever it is asked."""
    folder = tmp_path_factory.mktemp("attached")
    head = RecurrentHead(RecurrentHeadShape(64, 16, 259, 2), torch.arange(259))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    head.save(folder / "head", {})
    with running(
        folder / "logs",
        make_tiny_model(folder / "tiny"),
        verifiers=2,
        verifier_flags=("--drafters", f"h=heads:path={folder / 'head'}"),
        router_flags=("--in-process-drafters", "suffix", "--proposal-width", "2", *FIXED),
        faults={"verifier-1": "verifier.attached=raise"},
    ) as system:
        yield system


def bodies() -> list[dict[str, Any]]:
    """Greedy and sampled; free, and with so few ids that guesses are often right."""
    found: list[dict[str, Any]] = []
    for number in range(4):
        body = {"prompt": [70 + number, 71, 72], "max_tokens": 40, "temperature": (0, 0.9)[number % 2], "seed": number}
        found += [body, {**body, "allowed_token_ids": FEW, "ignore_eos": True}]
    return found


def test_texts_are_those_of_plain_decoding(system: System) -> None:
    """All requests at once, with heads alone and beside another drafter, on the verifier whose head fails and on the
    other one. Heads are counted by their id, and what they said was accepted."""
    everything, port = bodies(), system.router.port
    expected = [plain(port, body) for body in everything]
    accepted = 0
    for drafters in (["h"], ["h", "suffix"], None):
        asked = [body if drafters is None else body | {"drafters": drafters} for body in everything]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda body: complete(port, body), asked))
        for one, right in zip(found, expected, strict=True):
            assert_same(one, right)
            accepted += one.drafting["drafters"].get("h", {}).get("num_accepted_tokens", 0)
    assert accepted > 20
    assert system.router.metric("moot_proposals_accepted_tokens_total", drafter="h") >= accepted
    assert system.verifiers[0].metric("moot_draft_seconds_count") > 10
    failed = {"drafter": "h", "reason": "failed"}
    until(lambda: system.verifiers[1].metric("moot_proposals_dropped_total", **failed) == 1, "it failed once")
    assert all(verifier.is_running for verifier in system.verifiers)


def test_a_request_may_leave_them_out(system: System) -> None:
    """By `drafters`, as with any other; a name that there is not is refused, and the refusal names them."""
    port = system.router.port
    assert set(complete(port, bodies()[0] | {"drafters": ["suffix"]}).proposed) <= {"suffix"}
    refused = Ask(port, bodies()[0] | {"drafters": ["nobody"]}).result()
    assert refused.status == 400
    assert refused.error is not None
    assert "some of: h, " in refused.error["message"]
