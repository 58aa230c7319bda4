"""Out of memory in whole systems: requests are slower, at worst one is refused, and every process goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moot.testing.tiny_model import make_tiny_model
from moot.tokenizer import load_tokenizer
from tests.integration.asking import assert_same
from tests.integration.faulty import LETTERS, Rig, body, chat_body
from tests.integration.looping_model import make_alike
from tests.integration.processes import at_least, wait_metric
from tests.integration.whole_system import FIXED, running

NUM = 8


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """In the verifier passes with chat requests in them find memory for three tokens, its inside drafter finds none for
    them, and no cache any beyond 768 slots; the neural drafter's caches find none beyond 256."""
    folder = tmp_path_factory.mktemp("memory")
    model = make_tiny_model(folder / "tiny")
    with running(
        folder / "logs",
        model,
        drafters={"neural": "neural", "suffix": "suffix"},
        drafter_flags=("--model", str(make_alike(model, folder / "draft")), "--num-threads", "1"),
        verifier_flags=("--drafters", "lookahead", "--kv-capacity-tokens", "4096"),
        router_flags=FIXED,
        faults={
            "drafter-neural": "kv.allocate=memory:256",
            "verifier-0": "verifier.forward=memory:3@chatcmpl-*;verifier.attached=memory:0@chatcmpl-*;"
            "kv.allocate=memory:768",
        },
    ) as system:
        yield Rig(system)


def test_steps_without_memory_are_repeated_smaller(rig: Rig) -> None:
    """Eight requests at once where a pass of more than three tokens finds no memory, in the middle of the pass: all
    texts are right, streamed and not, and what it cost is counted. The drafter inside the verifier says nothing."""
    router, (verifier,) = rig.system.router, rig.system.verifiers
    bodies = [chat_body(index, 24) for index in range(NUM)]
    # The same ids asked for as completions, which the faults leave alone.
    tokenizer = load_tokenizer(rig.system.model)
    texts = [
        tokenizer.apply_chat_template(one["messages"], tokenize=False, add_generation_prompt=True) for one in bodies
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = rig.all_expected([body(index, 24, prompt=prompts[index]) for index in range(NUM)])
    asks = [rig.ask(asked, chat=True, stream=index % 2 > 0) for index, asked in enumerate(bodies)]
    for ask, right in zip(asks, expected, strict=True):
        assert_same(ask.result(), right)
    assert verifier.metric("moot_out_of_memory_total", cost="step") > NUM
    assert verifier.metric("moot_out_of_memory_total", cost="drafter") > 0
    assert verifier.metric("moot_out_of_memory_total", cost="request") == 0
    assert router.metric("moot_request_moves_total") == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_request_for_which_there_is_never_memory_fails_alone(rig: Rig, stream: bool) -> None:
    """It is tried a few times, then its caller is told, with the time to come again. The others are right, the verifier
    holds nothing of it, and nobody takes it for lost."""
    router, (verifier,) = rig.system.router, rig.system.verifiers
    failed = verifier.metric("moot_out_of_memory_total", cost="request")
    bodies = [body(index, 60) for index in range(3)]
    with rig.under_way(bodies, 0):
        refused = rig.ask(body(9, prompt=[index % 250 for index in range(900)]), stream=stream).result()
        refused.assert_refused(503, "out_of_memory")
    assert verifier.metric("moot_out_of_memory_total", cost="request") == failed + 3
    rig.system.assert_idle()
    assert verifier.metric("moot_kv_cache_usage_ratio") == 0
    assert router.metric("moot_request_moves_total") == 0
    assert router.probe("/readyz") == verifier.probe("/livez") == 200


def test_a_neural_drafter_without_memory_abstains(rig: Rig) -> None:
    """Its cache cannot hold these prompts: it has nothing to say about them, others do, and it serves short ones on."""
    router, drafter = rig.system.router, rig.system.drafters["neural"]
    bodies = [body(index, 40, prompt=f"{LETTERS} {index} " * 30) for index in range(4)]
    with rig.under_way(bodies, 0):
        pass
    wait_metric(drafter, "moot_asks_dropped_total", at_least(1), reason="memory")
    assert drafter.metric("moot_asks_dropped_total", reason="failed") == 0
    assert "no memory to draft" in drafter.log
    before = router.metric("moot_proposal_tokens_total", drafter="neural")
    rig.ask_right(1)
    wait_metric(router, "moot_proposal_tokens_total", lambda value: value > before, drafter="neural")


def test_a_full_kv_cache_makes_requests_wait(rig: Rig) -> None:
    """Room for four of twelve at their full length: they take turns, lose their cache and get it back, and nobody is
    refused."""
    router = rig.system.router
    bodies = [body(index, 50, prompt=[(index * 7 + n * n) % 250 for n in range(490)]) for index in range(12)]
    expected = rig.all_expected(bodies[:4])
    refused = router.metric("moot_requests_refused_total")
    replies = [ask.result() for ask in [rig.ask(asked) for asked in bodies]]
    for reply, right in zip(replies, expected, strict=False):
        assert_same(reply, right)
    assert all(reply.is_complete and len(reply.token_ids) == 50 for reply in replies)
    assert router.metric("moot_requests_refused_total") == refused
