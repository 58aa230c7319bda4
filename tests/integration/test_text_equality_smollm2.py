"""A real model in bfloat16, in batch-invariant mode, as services on a CPU: the text of plain decoding, id by id."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moot.model.loading.prepare import SMOLLM2, prepare
from moot.shipped import cache_dir
from tests.integration.asking import Reply, assert_same, complete
from tests.integration.whole_system import FIXED, System, running

SHARED = (
    "You are asked about this list of fruit and colours. apple: red; banana: yellow; cherry: red; kiwi: green; "
    "lemon: yellow; lime: green; mango: orange; orange: orange; peach: pink; pear: green; plum: purple; grape: purple. "
)
QUESTIONS = (
    "Repeat the list of fruit and colours word by word.",
    "Write the list again, as lines of the form `fruit is colour`.",
    "Count from 1 to 30, separated by commas: 1, 2, 3, 4, 5, 6,",
    "Which fruit is purple?",
)
PARAMS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.95})


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    verifier = ("--dtype", "bfloat16", "--batch-invariant", "on", "--num-threads", "2", "--stall-limit-s", "120")
    patient = ("--open-timeout-s", "120", "--verify-timeout-s", "60", "--max-missed-heartbeats", "10")
    with running(
        tmp_path_factory.mktemp("smollm2"),
        prepare(SMOLLM2, cache_dir()),
        verifier_flags=verifier,
        router_flags=("--in-process-drafters", "prompt_lookup,suffix", *FIXED, *patient),
    ) as system:
        yield system


def test_texts_of_a_real_model_do_not_depend_on_drafts_or_company(smollm2: System) -> None:
    """C01, C04: in bfloat16, greedy and sampled: cold and alone without drafting = with drafting and a warm prefix
    cache = four at a time in one batch, drafted or not: ids, log-probabilities and all."""
    bodies = [
        {"messages": [{"role": "user", "content": SHARED + question}], "max_tokens": 24, "logprobs": True, **params}
        for question, params in zip(QUESTIONS, itertools.cycle(PARAMS))
    ]

    def ask(body: dict[str, Any], length: int, salt: str) -> Reply:
        return complete(smollm2.router.port, body | {"num_speculative_tokens": length, "cache_salt": salt}, chat=True)

    def num_cached(replies: list[Reply]) -> list[int]:
        return [one.usage["prompt_tokens_details"]["cached_tokens"] for one in replies]

    # Another salt, another prefix cache.
    cold = [ask(body, 0, str(number)) for number, body in enumerate(bodies)]
    warm = [ask(body, 8, "shared") for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        batched = list(pool.map(ask, bodies, (8, 0, 4, 8), itertools.repeat("shared")))
    assert num_cached(cold) == [0] * len(bodies)
    assert min(num_cached([*warm[1:], *batched])) >= 64
    for drafted in (warm, batched):
        for one, right in zip(drafted, cold, strict=True):
            assert_same(one, right)
    # Drafts were accepted and rejected; how many depends on the texts, and these on the numerics of the machine.
    accepted = sum(one.drafting["num_accepted_tokens"] for one in warm)
    assert accepted > 5
    assert sum(one.drafting["num_draft_tokens"] for one in warm) > accepted + 10
