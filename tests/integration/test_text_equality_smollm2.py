"""A real model in bfloat16, in batch-invariant mode, as services on a CPU: the text of plain decoding, id by id."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moot.model.loading.prepare import SMOLLM2, prepare
from moot.shipped import cache_dir
from tests.integration.api import CHAT, choice_of
from tests.integration.shared_systems import FIXED, IN_PROCESS
from tests.integration.whole_system import System, running

MAX_TOKENS = 24
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
def smollm2(systems_folder: Path) -> Iterator[System]:
    model = prepare(SMOLLM2, cache_dir())
    verifier = ("--dtype", "bfloat16", "--batch-invariant", "on", "--num-threads", "2", "--stall-limit-s", "120")
    patient = ("--open-timeout-s", "120", "--verify-timeout-s", "60", "--max-missed-heartbeats", "10")
    with running(
        systems_folder / "smollm2-logs",
        model,
        verifier_flags=verifier,
        router_flags=(*IN_PROCESS, *FIXED, *patient),
    ) as system:
        yield system


@pytest.mark.parametrize("params", PARAMS, ids=("greedy", "sampled"))
def test_texts_of_a_real_model_do_not_depend_on_drafts_or_company(smollm2: System, params: dict[str, Any]) -> None:
    """C01, C04: in bfloat16, cold and alone without drafting = with drafting and a warm prefix cache = four at a time
    in one batch, drafted or not: ids, log-probabilities and all."""
    bodies = [
        {
            "messages": [{"role": "user", "content": SHARED + question}],
            "max_tokens": MAX_TOKENS,
            "logprobs": True,
            **params,
        }
        for question in QUESTIONS
    ]

    def ask(body: dict[str, Any], length: int, salt: str) -> dict[str, Any]:
        return choice_of(smollm2.router, body | {"num_speculative_tokens": length, "cache_salt": salt}, CHAT)

    # Another salt, another prefix cache.
    cold = [ask(body, 0, f"{params} {number}") for number, body in enumerate(bodies)]
    warm = [ask(body, 8, "shared") for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        batched = list(pool.map(ask, bodies, (8, 0, 4, 8), itertools.repeat("shared")))
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in cold] == [0] * len(bodies)
    assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64 for one in (*warm[1:], *batched))
    for plain, alone, beside in zip(cold, warm, batched, strict=True):
        for drafted in (alone, beside):
            assert drafted["token_ids"] == plain["token_ids"]
            assert drafted["message"] == plain["message"]
            assert drafted["logprobs"] == plain["logprobs"]
    # Drafts were accepted and rejected; how many depends on the texts, and these on the numerics of the machine.
    assert sum(one["metrics"]["num_accepted_tokens"] for one in warm) > 5
    assert sum(one["metrics"]["num_draft_tokens"] - one["metrics"]["num_accepted_tokens"] for one in warm) > 10
