"""Known kinds of mistakes through the whole path: HTTP, store, drafters, votes on trees and on chains, verifier.

The target with known cycles (looping_model.py) places ends, stops and long characters inside accepted drafts, and says
beforehand what the text must be. The same rules under every policy and for every family: tests/paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.asking import Ask, Reply, assert_same, complete, plain
from tests.integration.looping_model import CYCLES, END_ID, ENDING, LETTERS, greedy_ids, make_looping_model
from tests.integration.processes import Process
from tests.integration.whole_system import EVERYBODY, FIXED, System, running

Body = dict[str, Any]

HA = list(b" ha ha ha")
EMOJI = list(LETTERS * 2)
ENDS = [*ENDING, *b"12"]
"""Goes on with 3, 4, 5 and the end token, and drafters that copy propose all of them in one draft."""
CONTEXT = 40_960
NARROW_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Looping:
    """Drafters as processes, records in a store, and three routers: votes on trees, Minions' majority vote on chains,
    and one whose links carry frames of at most NARROW_BYTES."""

    system: System
    tree: Process
    chain: Process
    narrow: Process


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looping]:
    folder = tmp_path_factory.mktemp("looping")
    model = make_looping_model(folder / "model", context=CONTEXT)
    drafters = ("suffix", "prompt_lookup", "recycling")
    with running(folder / "logs", model, drafters=drafters, store=True, router_flags=FIXED) as system:
        minions = ("--vote", "majority", "--shape", "chain", "--weights", "minions", "--length", "minions")
        chain = system.add_router((*minions, *EVERYBODY))
        narrow = system.add_router((*FIXED, "--max-message-bytes", str(NARROW_BYTES)))
        yield Looping(system, system.router, chain, narrow)


def decoded(ids: Sequence[int]) -> str:
    """What the ids' bytes say, without special tokens; an incomplete character at the end is dropped."""
    raw = bytes(token for token in ids if token < 256)
    for cut in range(4):
        try:
            return raw[: len(raw) - cut].decode()
        except UnicodeDecodeError:
            continue
    return raw.decode("utf-8", "replace")


def known(body: Body) -> tuple[list[int], str, str]:
    """Ids, text and ending of a greedy text, by the rules as they are written down and without the product's code."""
    ids = greedy_ids(body["prompt"], body["max_tokens"])
    for count in range(1 + body.get("min_tokens", 0), len(ids) + 1):
        kept, last = ids[:count], ids[count - 1]
        if last in body.get("stop_token_ids", ()):
            return kept, decoded(kept[:-1]), "stop"
        stops = [stop for stop in body.get("stop", ()) if decoded(kept).endswith(stop)]
        if stops:
            shows = body.get("include_stop_str_in_output")
            return kept, decoded(kept).removesuffix("" if shows else max(stops, key=len)), "stop"
        if last == END_ID and not body.get("ignore_eos"):
            return kept, decoded(kept), "stop"
    return ids, decoded(ids), "length"


def answered(looping: Looping, body: Body) -> Reply:
    """The answer with drafts of eight, whole from votes on trees, streamed from votes on chains: both are plain
    decoding's, with its logprobs, usage and end, and nothing of it is half a character."""
    eight = body | {"num_speculative_tokens": 8}
    chat = "messages" in body
    undrafted = plain(looping.tree.port, body, chat=chat)
    assert undrafted.drafting["num_draft_tokens"] == 0
    drafted = complete(looping.tree.port, eight, chat=chat)
    usage = {"stream_options": {"include_usage": True}}
    streamed = complete(looping.chain.port, eight | usage, stream=True, chat=chat)
    for one in (drafted, streamed):
        assert_same(one, undrafted)
        assert one.usage["completion_tokens"] == len(one.token_ids) == undrafted.usage["completion_tokens"]
        assert one.usage["prompt_tokens"] == undrafted.usage["prompt_tokens"]
        assert len(one.logprobs) == (len(one.token_ids) if body.get("logprobs") is not None else 0)
    return drafted


COPIED = (
    *({"prompt": HA, "max_tokens": count} for count in (*range(1, 12), 50)),
    *({"prompt": EMOJI, "max_tokens": count} for count in (*range(1, 14), 50)),
    *({"prompt": HA, "max_tokens": 20, "temperature": heat, "seed": 7} for heat in (1e-9, 1e-6, 1e-5, 1e-3)),
    {"prompt": ENDS, "max_tokens": 64},
    {"prompt": ENDS, "max_tokens": 64, "min_tokens": 3},
    {"prompt": ENDS, "max_tokens": 50, "ignore_eos": True},
    {"prompt": ENDS, "max_tokens": 50, "ignore_eos": True, "stop_token_ids": [ord("4")]},
    *({"prompt": HA, "max_tokens": 32, "stop": [decoded(greedy_ids(HA, count))]} for count in range(2, 11)),
    *({"prompt": HA, "max_tokens": 30, "stop": ["ha"], "min_tokens": least} for least in (4, 10, 11, 12)),
    *(
        {"prompt": prompt, "max_tokens": count, "stop": stop, "include_stop_str_in_output": count == 23}
        for stop in (["ha hax"], ["ha ha ha ha!", "a h"], ["zzz", "ha ha ha ha ha"], [" ha ha h"], ["é😀ж!"], ["😀"])
        for prompt, count in ((HA, 14), (HA, 23), (EMOJI, 23))
    ),
    {"prompt": list(b"0123456789 \xf0\x9f\x98\x80" * 1400)[: 20_000 - 9] + HA, "max_tokens": 30},
)
"""Requests whose text goes round a cycle, so that every draft of eight is right."""


@pytest.mark.parametrize("body", COPIED, ids=lambda body: " ".join(f"{name}={body[name]}"[:24] for name in body))
def test_a_text_that_is_known_beforehand(looping: Looping, body: Body) -> None:
    """C01, C09, C10, C11, C12, C13, C14, C16, C18: ids, text and end are what the cycle says, in as few rounds as
    blocks of nine tokens take, of which all but the next token was drafted."""
    drafted = answered(looping, {"temperature": 0, "logprobs": 2} | body)
    assert (drafted.token_ids, drafted.text, drafted.finish_reason) == known(body)
    assert "\ufffd" not in drafted.text
    assert drafted.usage["prompt_tokens"] == len(body["prompt"])
    counts = drafted.drafting
    assert counts["num_drafts"] == -(-(len(drafted.token_ids) - 1) // 9)
    # The opening and each round have a token of the target's own, but for a round that ended inside its draft.
    most = 1 + counts["num_drafts"] + counts["num_accepted_tokens"]
    assert most - 1 <= len(drafted.token_ids) <= most
    assert all(entry["token_logprobs"] == entry["top_logprobs"][entry["tokens"]] < 0 for entry in drafted.logprobs)


FILTERS = (
    {"logit_bias": {"97": -100}},
    {"allowed_token_ids": [32, 97, 104, 120]},
    {"top_k": 2},
    {"top_p": 0.5, "min_p": 0.2},
    {"repetition_penalty": 1.6, "frequency_penalty": 2.0, "presence_penalty": -1.0},
)
FREE = (
    *(
        {"prompt": prompt, "max_tokens": 30, "temperature": heat, "seed": 11, "logprobs": 0, **one}
        for one, prompt, heat in itertools.product(FILTERS, (HA, EMOJI), (0, 0.6, 1.2))
    ),
    *({"prompt": ENDS, "max_tokens": 30, "temperature": 0, "min_tokens": least} for least in (4, 8, 20)),
    {"prompt": "AAAA", "max_tokens": 16, "temperature": 0, "allowed_token_ids": [66, 65, 67]},
    {"prompt": HA, "max_tokens": 20, "temperature": 2.0, "seed": 3},
    *({"prompt": prompt, "max_tokens": 6, "temperature": 0} for prompt in (" ", "\u0000", "a\u0301", "😀", [0], [258])),
    *(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 20, "temperature": 0.5, "seed": 6}
        | {"logprobs": True, "top_logprobs": 2, "logit_bias": {str(token): 4 for token in b" ha"}}
        for content in ("ha ha ha ha ha ha", "", [{"type": "text", "text": ""}])
    ),
)
"""Requests of which only plain decoding says what comes."""


@pytest.mark.parametrize("body", FREE, ids=lambda body: " ".join(f"{name}={body[name]}"[:24] for name in body))
def test_any_other_text(looping: Looping, body: Body) -> None:
    """C01, C12, C16, C17, C18, C23: filters, penalties and masks act on accepted tokens as on the next one; of equal
    logits the lowest id is taken; odd prompts have a text."""
    ids = answered(looping, body).token_ids
    assert 0 < len(ids) <= body["max_tokens"]
    assert END_ID not in ids[: body.get("min_tokens", 0)]
    assert not set(ids) & {int(id_) for id_, bias in body.get("logit_bias", {}).items() if bias == -100}
    assert set(ids) <= set(body.get("allowed_token_ids", ids))
    if body.get("prompt") == "AAAA":
        # Tokens of no cycle have rows of zeros: their logits are equal everywhere.
        assert ids == [65] * 16


REFUSED: tuple[tuple[Body, str, int], ...] = (
    *(({"prompt": HA, name: value}, name, 400) for name, value in (("top_k", 2**31), ("temperature", -1e-9))),
    *(({"prompt": HA, name: value}, name, 400) for name, value in (("drafters", ["nobody"]), ("best_off", {}))),
    *(({"prompt": prompt}, "prompt", 400) for prompt in ("", [259], [97] * CONTEXT, "a" * CONTEXT, "é" * 1_000_000)),
    *(({"messages": [{"role": "user", "content": text}]}, "messages", 400) for text in ("a" * CONTEXT, "é" * 10**6)),
    ({"messages": []}, "messages", 400),
    ({"prompt": "x" * 9_000_000}, "", 413),
)


def test_what_cannot_be_meant_is_refused_by_its_name(looping: Looping) -> None:
    """C19, C22, C23: with the limits of the real target and the names of the real drafters; the next request is
    served."""
    for body, param, status in REFUSED:
        reply = Ask(looping.tree.port, body, chat="messages" in body, stream=False).result()
        assert reply.status == status, reply
        assert reply.error is not None
        assert (reply.error["param"] or "") == param, reply.error
    assert complete(looping.tree.port, {"prompt": HA, "max_tokens": 5, "temperature": 0}).text == " ha h"


def test_prompts_that_fit_one_frame_each_need_not_fit_it_together(looping: Looping) -> None:
    """C27: four prompts of 10 KB sent in the same turn over links of 16 KiB: each arrives, and no stream breaks."""
    prompt = [200] * 5000 + HA  # ids from 128 on are two bytes each
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "n": 4, "num_speculative_tokens": 4}
    answer = complete(looping.narrow.port, body)
    assert answer.token_ids == greedy_ids(HA, 12) * 4
    assert answer.drafting["num_accepted_tokens"] > 0
    assert looping.narrow.metric("moot_request_moves_total") == 0


def test_a_prompt_above_the_message_limit_fails_alone(looping: Looping) -> None:
    """C27: above the limit of a link a request gets a clean error; its neighbours do not notice."""
    router = looping.narrow
    neighbour = Ask(router.port, {"prompt": HA, "max_tokens": 2000, "ignore_eos": True, "temperature": 0})
    neighbour.wait_tokens(1)
    refused = Ask(router.port, {"prompt": [200] * NARROW_BYTES, "max_tokens": 4}).result()
    assert refused.status == 413, refused
    assert refused.error is not None
    assert refused.error["type"] == "invalid_request_error"
    assert neighbour.result().token_ids == greedy_ids(HA, 2000)
    assert router.metric("moot_request_moves_total") == 0


SORTS: tuple[Body, ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "stop": ["e", "a"]},
    {"temperature": -1},
    {"max_tokens": 1000, "ignore_eos": True},
    {"num_speculative_tokens": 0},
)


def test_nothing_is_held_after_many_varied_requests(looping: Looping) -> None:
    """C04, C24: two hundred at once in eights: each that is not refused or given up has the text that it has alone;
    then sessions of verifier and drafters, KV, places in the pool and running requests have all gone back to zero."""

    def ask(number: int) -> tuple[str, list[int]]:
        cycle = CYCLES[number % len(CYCLES)]
        body = {"prompt": list(cycle) * (1 + number % 30), "max_tokens": 8, "seed": number % 28}
        sort = number % len(SORTS)
        asked = Ask(looping.tree.port, body | SORTS[sort], stream=sort != 2)
        if sort == 5:
            asked.wait_tokens(2)
            asked.give_up()
            return "given up", []
        reply = asked.result()
        return "refused" if reply.status == 400 else "whole" if reply.is_complete else f"{reply}", reply.token_ids

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(ask, range(200)))
    assert {ending for ending, _ in outcomes} == {"whole", "refused", "given up"}
    looping.system.assert_idle()
    for number in range(1, 200, 13):
        assert sorted(ask(number)[1]) == sorted(outcomes[number][1])
