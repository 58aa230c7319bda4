"""Text, ids, ends and log-probabilities through the whole path: the same with drafting and without it, by known
kinds of mistakes. The target with known cycles places ends, stops and long characters inside accepted drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.integration.api import CHAT, assert_same, choice_of, events, ids_of, text_of, whole
from tests.integration.looping_model import CYCLES, END_ID, ENDING, LETTERS, greedy_ids
from tests.integration.processes import Process
from tests.integration.shared_systems import VOTES, Looping, Voting
from tests.integration.whole_system import System

GREEDY = {"temperature": 0}
OFF = {"num_speculative_tokens": 0}
EIGHT = {"num_speculative_tokens": 8}

HA = list(b" ha ha ha")
EMOJI = list(LETTERS * 2)
ENDS = [*ENDING, *b"12"]
"""Goes on with 3, 4, 5 and the end token, and drafters that copy propose all of them in one draft."""

PROMPTS = ("The quick brown fox", "naïve café 😀 résumé", "x = [1, 2, 3]; y = [1, 2, 3]; z = ")

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.5, "seed": 4, "min_p": 0.1},
)


def drafted_and_plain(router: Process, body: dict[str, Any], path: str = "/v1/completions") -> tuple[Any, Any]:
    """The same request with drafts of eight and with none, found to be equal."""
    plain, drafted = choice_of(router, body | OFF, path), choice_of(router, body | EIGHT, path)
    assert plain["metrics"]["num_draft_tokens"] == 0
    assert_same(drafted, plain)
    return drafted, plain


def decoded(ids: Sequence[int]) -> str:
    """What the ids' bytes say, without special tokens; an incomplete character at the end is dropped."""
    raw = bytes(token for token in ids if token < 256)
    for cut in range(4):
        try:
            return raw[: len(raw) - cut].decode()
        except UnicodeDecodeError:
            continue
    return raw.decode("utf-8", "replace")


@pytest.mark.parametrize("vote", VOTES)
def test_drafting_changes_no_id_under_any_vote(voting: Voting, vote: str) -> None:
    """C01: drafting on = off, greedy and sampled, for every vote, shape, weight and length policy."""
    router = voting.routers[vote]
    accepted = 0
    for prompt, params in itertools.product(PROMPTS, (GREEDY, *SAMPLED)):
        body = {"prompt": prompt, "max_tokens": 24, "logprobs": 1, **params}
        drafted, plain = drafted_and_plain(router, body)
        assert_same(choice_of(router, body), plain)  # at the length that the policy chooses
        accepted += drafted["metrics"]["num_accepted_tokens"]
    assert accepted > 50


def test_drafting_changes_no_id_in_other_families(short_sighted: System, gpt_neox: System) -> None:
    """C01: as above for other kinds of attention and normalisation (qwen3, gpt_neox)."""
    for system in (short_sighted, gpt_neox):
        accepted = 0
        for prompt, params in itertools.product(PROMPTS, (GREEDY, *SAMPLED)):
            # A bias towards few tokens makes texts that repeat, so that copying drafters hit.
            body = {"prompt": prompt, "max_tokens": 40, "logit_bias": {str(t): 20 for t in b"abc"}, **params}
            drafted, _ = drafted_and_plain(system.router, body)
            accepted += drafted["metrics"]["num_accepted_tokens"]
        assert accepted > 50


def test_equal_logits_are_decided_alike(looping: Looping) -> None:
    """C01: of tokens with the same greatest logit the lowest id is taken, drafted or not."""
    for router in looping.routers:
        # Tokens of no cycle have rows of zeros: their logits are equal everywhere.
        tied, _ = drafted_and_plain(
            router, {"prompt": "AAAA", "max_tokens": 16, "allowed_token_ids": [66, 65, 67]} | GREEDY
        )
        assert tied["token_ids"] == [65] * 16
        assert tied["metrics"]["num_accepted_tokens"] > 0


def test_text_ids_logprobs_and_usage_end_at_the_stop(looping: Looping) -> None:
    """C09: a stop string that ends inside an accepted block of nine; all of the answer ends at that token."""
    for router in looping.routers:
        body = {"prompt": HA, "max_tokens": 64, "stop": " ha ha ha", "logprobs": 0, **GREEDY}
        drafted, _ = drafted_and_plain(router, body)
        assert (drafted["text"], drafted["finish_reason"], drafted["stop_reason"]) == ("", "stop", " ha ha ha")
        assert drafted["token_ids"] == HA
        assert len(drafted["logprobs"]["tokens"]) == len(drafted["logprobs"]["token_logprobs"]) == 9
        assert drafted["usage"]["completion_tokens"] == 9
        assert drafted["metrics"]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("place", range(1, 10))
def test_a_stop_may_be_any_token_of_a_block(looping: Looping, place: int) -> None:
    """C09: the stop is completed by the n-th token of a block of nine, the first included; only kept tokens count."""
    # The first token comes with the opening, so the block begins with the second.
    kept = greedy_ids(HA, 1 + place)
    body = {"prompt": HA, "max_tokens": 32, "stop": decoded(kept), "logprobs": 0, **GREEDY}
    drafted, _ = drafted_and_plain(looping.tree, body)
    assert (drafted["text"], drafted["finish_reason"]) == ("", "stop")
    assert drafted["token_ids"] == kept
    assert len(drafted["logprobs"]["token_logprobs"]) == drafted["usage"]["completion_tokens"] == 1 + place
    assert drafted["metrics"]["num_drafts"] == 1
    assert drafted["metrics"]["num_accepted_tokens"] == min(place, 8)
    assert drafted["metrics"]["num_draft_tokens"] == 8


def test_an_end_token_inside_a_draft_ends_the_text(looping: Looping) -> None:
    """C10: the end token is the fourth of an accepted draft of eight: nothing after it is delivered or counted."""
    for router in looping.routers:
        drafted, _ = drafted_and_plain(router, {"prompt": ENDS, "max_tokens": 64, "logprobs": 0, **GREEDY})
        assert drafted["text"] == "345"
        assert drafted["token_ids"] == [*b"345", END_ID]
        assert drafted["finish_reason"] == "stop"
        assert drafted["metrics"]["num_accepted_tokens"] == 3
        assert drafted["metrics"]["num_drafts"] == 1


def test_with_ignore_eos_the_text_goes_on(looping: Looping) -> None:
    """C10: with ignore_eos true it goes on to max_tokens, end tokens inside accepted drafts and all."""
    for router in looping.routers:
        body = {"prompt": ENDS, "max_tokens": 40, "ignore_eos": True, **GREEDY}
        drafted, _ = drafted_and_plain(router, body)
        assert drafted["token_ids"] == greedy_ids(ENDS, 40)
        assert drafted["token_ids"].count(END_ID) > 3
        assert drafted["finish_reason"] == "length"
        assert drafted["metrics"]["num_accepted_tokens"] > 20
        by_id, _ = drafted_and_plain(router, body | {"stop_token_ids": [ord("4")]})
        assert by_id["token_ids"] == [*b"34"]
        assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", ord("4"))


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_exact(looping: Looping, max_tokens: int) -> None:
    """C11: max_tokens 1 to 9 with drafts of eight gives exactly so many tokens, and usage says so."""
    for router, prompt in itertools.product(looping.routers, (HA, EMOJI)):
        body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0, **GREEDY}
        drafted, _ = drafted_and_plain(router, body)
        assert drafted["token_ids"] == greedy_ids(prompt, max_tokens)
        assert drafted["usage"]["completion_tokens"] == max_tokens
        assert len(drafted["logprobs"]["token_logprobs"]) == max_tokens
        assert drafted["finish_reason"] == "length"
        assert drafted["metrics"]["num_accepted_tokens"] == max(0, max_tokens - 2)
        streamed = events(router, body | EIGHT | {"stream_options": {"include_usage": True}})
        assert ids_of(streamed) == drafted["token_ids"]
        assert streamed[-1]["usage"]["completion_tokens"] == max_tokens


def test_an_end_before_min_tokens_is_masked_in_the_draft(looping: Looping) -> None:
    """C12: the end token lies in the draft before min_tokens: masked while fewer than so many came before."""
    for router, least in itertools.product(looping.routers, (1, 3, 4, 5, 8, 20)):
        body = {"prompt": ENDS, "max_tokens": 30, "min_tokens": least, "logprobs": 0, **GREEDY}
        drafted, _ = drafted_and_plain(router, body)
        ids = drafted["token_ids"]
        assert len(ids) >= least
        assert END_ID not in ids[:least]
        assert (ids == [*b"345", END_ID]) == (least <= 3)
        assert drafted["metrics"]["num_draft_tokens"] > 0


def test_a_stop_before_min_tokens_does_not_count(looping: Looping) -> None:
    """C12: stop ids are masked, stop strings pass by, as long as the first min_tokens tokens complete them."""
    for router, least in itertools.product(looping.routers, (4, 10, 11, 12)):
        body = {"prompt": HA, "max_tokens": 30, "min_tokens": least, "stop": "ha", **GREEDY}
        drafted, _ = drafted_and_plain(router, body)
        assert drafted["token_ids"] == greedy_ids(HA, (least // 3 + 1) * 3)
        assert drafted["finish_reason"] == "stop"
        assert drafted["metrics"]["num_accepted_tokens"] > 0
        by_id, _ = drafted_and_plain(router, body | {"stop": None, "stop_token_ids": [ord("a")]})
        assert ord("a") not in by_id["token_ids"][:least]


STOPS = (["ha hax"], ["ha ha ha ha!", "a h"], ["zzz", "ha ha ha ha ha"], [" ha ha h", "a ha ha ha"], ["é😀ж!"], ["xé"])


@pytest.mark.parametrize("stop", STOPS)
def test_no_beginning_of_a_stop_leaks_into_the_stream(looping: Looping, stop: list[str]) -> None:
    """C13: the joined stream is the whole text; a held tail is sent when it cannot become a stop any more."""
    router = looping.tree
    for prompt in (HA, EMOJI):
        for count, options in itertools.product((14, 23), ({}, {"include_stop_str_in_output": True})):
            body = {"prompt": prompt, "max_tokens": count, "stop": stop, **options, **GREEDY}
            drafted, _ = drafted_and_plain(router, body)
            streamed = events(router, body | EIGHT)
            assert text_of(streamed) == drafted["text"]
            assert ids_of(streamed) == drafted["token_ids"]
            full = decoded(greedy_ids(prompt, count))
            found = [full.index(one) for one in stop if one in full]
            if not found:
                assert drafted["text"] == full
                assert drafted["finish_reason"] == "length"
            elif not options:
                assert not any(one in drafted["text"] for one in stop)
                assert full.startswith(drafted["text"])


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_characters_of_many_bytes_come_whole(looping: Looping, max_tokens: int) -> None:
    """C14: emoji and accents split over rounds, drafts and max_tokens: no U+FFFD, and stream = whole text."""
    router = looping.chain
    for length in (0, 2, 3, 8):
        body = {"prompt": EMOJI, "max_tokens": max_tokens, "num_speculative_tokens": length, **GREEDY}
        one, streamed = choice_of(router, body), events(router, body)
        assert one["text"] == decoded(greedy_ids(EMOJI, max_tokens))
        assert text_of(streamed) == one["text"]
        assert not any("\ufffd" in text_of([event]) for event in streamed)


def test_characters_of_many_bytes_survive_rejections(hostile: System) -> None:
    """C14: a rejection in the middle of a character leaves no mark: drafters lie at every position."""
    body = {"prompt": EMOJI, "max_tokens": 27, **EIGHT, **GREEDY}
    for drafters in (["liar"], ["good", "liar"], ["liar", "second_liar", "good"]):
        one = choice_of(hostile.router, body | {"drafters": drafters})
        assert one["text"] == decoded(greedy_ids(EMOJI, 27))
        assert one["metrics"]["num_draft_tokens"] > one["metrics"]["num_accepted_tokens"]
        assert text_of(events(hostile.router, body | {"drafters": drafters})) == one["text"]


def test_logprobs_are_the_targets_own(looping: Looping, voting: Voting) -> None:
    """C16: one entry per delivered token, equal to the run without drafting, of the token itself, never all 0."""
    cases: list[tuple[Process, Any]] = [(router, prompt) for router in looping.routers for prompt in (HA, EMOJI)]
    cases += [(voting.routers[vote], "The quick brown fox") for vote in ("calibrated", "majority")]
    accepted = 0
    for (router, prompt), params in itertools.product(cases, (GREEDY, {"temperature": 0.7, "seed": 5})):
        body = {"prompt": prompt, "max_tokens": 24, "logprobs": 3, **params}
        drafted, plain = drafted_and_plain(router, body)
        accepted += drafted["metrics"]["num_accepted_tokens"]
        rows = drafted["logprobs"]
        count = len(drafted["token_ids"])
        assert [len(rows[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
        assert len(set(rows["token_logprobs"])) > 1 or prompt in (HA, EMOJI)
        assert all(value < 0 for value in rows["token_logprobs"])
        assert all(top[token] == value for top, token, value in zip(
            rows["top_logprobs"], rows["tokens"], rows["token_logprobs"], strict=True
        ))  # fmt: skip
        unasked = choice_of(router, {**body, "logprobs": None} | EIGHT)
        assert (unasked["token_ids"], unasked["logprobs"]) == (plain["token_ids"], None)
    assert accepted > 50


def test_logprobs_of_chats_stream_one_by_one(looping: Looping) -> None:
    """C16: a streamed chat has one entry per token, in order, whole = streamed, drafted = plain."""
    body = {
        "messages": [{"role": "user", "content": "ha ha ha ha ha ha"}],
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {str(token): 4 for token in b" ha"},
        "temperature": 0.5,
        "seed": 6,
    }
    for router in looping.routers:
        drafted, _ = drafted_and_plain(router, body, CHAT)
        rows = drafted["logprobs"]["content"]
        assert len(rows) == len(drafted["token_ids"])
        assert [bytes(row["bytes"]) for row in rows if row["bytes"]][:3] == [
            bytes([token]) for token in drafted["token_ids"][:3] if token < 256
        ]
        streamed = events(router, body | EIGHT, CHAT)
        items = [choice["logprobs"] for event in streamed for choice in event["choices"] if choice["logprobs"]]
        assert [row for item in items for row in item["content"]] == rows
        assert drafted["metrics"]["num_accepted_tokens"] > 0


FILTERS: tuple[dict[str, Any], ...] = (
    {"logit_bias": {"97": -100}},
    {"logit_bias": {"97": 5, "104": -3, "240": 6}},
    {"allowed_token_ids": [*b" hxyz", 0xC3, 0xA9]},
    {"min_p": 0.5},
    {"top_k": 1},
    {"top_p": 0.5, "min_p": 0.02},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 2.0, "presence_penalty": -1.0},
)


@pytest.mark.parametrize("params", FILTERS)
def test_parameters_hold_at_every_position(looping: Looping, params: dict[str, Any]) -> None:
    """C17: bias, allowed ids, filters and penalties act on accepted tokens as on the bonus token: on = off."""
    accepted = 0
    for prompt, heat in itertools.product((HA, EMOJI), (0, 0.6, 1.2)):
        router = looping.chain if heat == 1.2 else looping.tree
        body = {"prompt": prompt, "max_tokens": 30, "temperature": heat, "seed": 11, "logprobs": 0, **params}
        drafted, _ = drafted_and_plain(router, body)
        accepted += drafted["metrics"]["num_accepted_tokens"]
        if params.get("logit_bias") == {"97": -100}:
            assert 97 not in drafted["token_ids"]
        if "allowed_token_ids" in params:
            assert set(drafted["token_ids"]) <= set(params["allowed_token_ids"])
    assert accepted > 0


def test_all_cold_temperatures_are_one_limit(looping: Looping) -> None:
    """C18: 0, 1e-9 and 1e-6 are greedy whatever the seed; 1e-5, 1e-3 and 2.0 sample without overflow; on = off."""
    for router in looping.routers:
        greedy = choice_of(router, {"prompt": HA, "max_tokens": 20, **GREEDY, **EIGHT})
        for seed, heat in enumerate((0, 1e-9, 1e-6, 1e-5, 1e-3)):
            body = {"prompt": HA, "max_tokens": 20, "temperature": heat, "seed": seed, "logprobs": 0}
            drafted, _ = drafted_and_plain(router, body)
            assert drafted["token_ids"] == greedy["token_ids"]
            assert drafted["metrics"]["num_accepted_tokens"] > 0
        texts = set()
        for seed in range(3):
            hot = {"prompt": HA, "max_tokens": 20, "temperature": 2.0, "seed": seed, "logprobs": 0}
            drafted, _ = drafted_and_plain(router, hot)
            texts.add(tuple(drafted["token_ids"]))
        assert len(texts) == 3


def test_choices_of_one_request_differ_and_are_reproducible(looping: Looping) -> None:
    """C01: n choices, each drawn with its own noise: on = off choice by choice, streamed and whole alike."""
    body = {"prompt": HA, "max_tokens": 20, "temperature": 1.3, "seed": 5, "n": 4}
    for router in looping.routers:
        plain, drafted = whole(router, body | OFF), whole(router, body | EIGHT)
        ids = [choice["token_ids"] for choice in drafted["choices"]]
        assert ids == [choice["token_ids"] for choice in plain["choices"]]
        assert len({tuple(one) for one in ids}) > 1
        streamed = events(router, body | EIGHT)
        assert [ids_of(streamed, index) for index in range(4)] == ids
        assert [text_of(streamed, index) for index in range(4)] == [choice["text"] for choice in drafted["choices"]]


def test_the_cycles_are_what_the_model_says(looping: Looping) -> None:
    """C01: the premise of this file: greedy text without drafting is the known one, and most of a draft is taken."""
    for cycle in CYCLES:
        body = {"prompt": list(cycle), "max_tokens": 50, "ignore_eos": True, **GREEDY}
        drafted, _ = drafted_and_plain(looping.tree, body)
        assert drafted["token_ids"] == greedy_ids(cycle, 50)
        assert drafted["metrics"]["num_accepted_tokens"] >= 40
