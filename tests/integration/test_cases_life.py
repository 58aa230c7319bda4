"""What is left behind: by clients that go, by late answers, by long prompts; and whether the counters are true."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moot.core.types import SamplingParams
from moot.testing.scripted_drafter import Manner
from tests.integration.api import COMPLETIONS, choice_of, events, ids_of, post, streaming, whole
from tests.integration.asking import Ask
from tests.integration.looping_model import END_ID, ENDING, greedy_ids
from tests.integration.processes import Process, get
from tests.integration.shared_systems import NARROW_BYTES, Looping, Scripted
from tests.integration.whole_system import System
from tests.waiting import until

HA = list(b" ha ha ha")
ENDLESS = {"prompt": HA, "max_tokens": 30_000, "ignore_eos": True, "temperature": 0}


def samples(router: Process) -> dict[tuple[str, ...], float]:
    """Every sample of the router's metrics by name and label values."""
    text = get(router.metrics_port, "/metrics").text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_hundred_clients_gone_leave_nothing(looping: Looping) -> None:
    """C24: client gone after the first chunk, a hundred times: all pods free everything, and the aborts are counted."""
    router = looping.tree
    before = router.metric("moot_requests_total", finish_reason="abort")

    def come_and_go(number: int) -> None:
        with streaming(router, ENDLESS | {"seed": number}) as lines:
            assert next(lines).startswith("data: ")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(100)))
    looping.system.assert_idle()
    assert router.metric("moot_requests_total", finish_reason="abort") - before == 100
    assert choice_of(router, {"prompt": HA, "max_tokens": 12, "temperature": 0})["token_ids"] == greedy_ids(HA, 12)


def test_clients_gone_before_a_whole_answer_leave_nothing(looping: Looping) -> None:
    """C24: a client that waits for a whole answer and goes away frees everything as well, n choices together."""
    router = looping.tree
    asks = [Ask(router.port, ENDLESS | {"n": 2}, stream=False) for _ in range(8)]
    until(lambda: router.metric("moot_num_requests_running") == 16, "16 choices run")
    for ask in asks:
        ask.give_up()
    looping.system.assert_idle()


def test_a_normal_end_is_no_abort(scripted: Scripted) -> None:
    """C24: no abort is sent to a verifier or a drafter for requests that end by themselves, and one for each other."""
    verifier, drafter = scripted.verifier, scripted.drafter
    for count in (1, 2, 9, 10):
        choice_of(scripted.router, {"prompt": HA, "max_tokens": count, "temperature": 0})
    stopped = choice_of(scripted.router, {"prompt": HA, "max_tokens": 60, "temperature": 0, "logprobs": 0})
    stop = stopped["logprobs"]["tokens"][20]
    choice_of(scripted.router, {"prompt": HA, "max_tokens": 60, "temperature": 0, "stop": stop})
    until(lambda: verifier.num_sessions == drafter.num_sessions == 0, "all sessions ended")
    assert verifier.counts["abort"] == drafter.counts["abort"] == 0
    with streaming(scripted.router, {"prompt": HA, "max_tokens": 5000, "temperature": 0}) as lines:
        assert next(lines)
        until(lambda: verifier.num_sessions == 1, "it runs")
    until(lambda: verifier.num_sessions == drafter.num_sessions == 0, "all sessions ended")
    assert verifier.counts["abort"] == drafter.counts["abort"] == 1


@pytest.mark.parametrize("length", [8, 2])
def test_doubled_and_foreign_answers_are_dropped_and_counted(scripted: Scripted, length: int) -> None:
    """C06: every answer of the verifier comes twice, after one of another round and one of another session; drafters
    answer twice, out of order or to other rounds. The text is the true one; what fits nothing is counted."""
    verifier, drafter, router = scripted.verifier, scripted.drafter, scripted.router
    verifier.double_answers = verifier.stale_answers = True
    manners = [Manner.TRUE, Manner.DOUBLE, Manner.STALE, Manner.UNKNOWN]
    drafter.manner = lambda: manners[drafter.counts["propose"] % len(manners)]
    drafter.spoil = 0.3
    for seed, heat in ((1, 0.0), (2, 0.8), (3, 0.8)):
        body = {"prompt": HA, "max_tokens": 60, "temperature": heat, "seed": seed, "num_speculative_tokens": length}
        drafted, plain = choice_of(router, body), choice_of(router, body | {"num_speculative_tokens": 0})
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["metrics"]["num_accepted_tokens"] > 0
        if not heat:
            assert (
                tuple(drafted["token_ids"]) == scripted.text.plain(HA, SamplingParams(temperature=0, max_tokens=60))[0]
            )
    dropped = {
        reason: router.metric("moot_answers_dropped_total", role="verifier", reason=reason)
        for reason in ("stale", "duplicate")
    }
    assert all(dropped.values()), dropped
    assert router.metric("moot_proposals_dropped_total", drafter="scripted") > 0


def test_answers_to_cancelled_requests_are_dropped(scripted: Scripted) -> None:
    """C06: a slow verifier answers requests that are gone; the answers are counted and reach no other request."""
    verifier, router = scripted.verifier, scripted.router
    verifier.step_s = 0.05
    kept = [Ask(router.port, {"prompt": [number], "max_tokens": 40, "temperature": 0}) for number in range(4)]
    gone = [Ask(router.port, {"prompt": [number], "max_tokens": 4000, "temperature": 0}) for number in range(20)]
    for ask in gone:
        ask.wait_tokens(1)
        ask.give_up()
    for number, ask in enumerate(kept):
        expected, _ = scripted.text.plain([number], SamplingParams(temperature=0, max_tokens=40))
        assert tuple(ask.result().token_ids) == expected
    until(lambda: router.metric("moot_answers_dropped_total", role="verifier", reason="stale") > 0, "dropped")
    until(lambda: verifier.num_sessions == 0, "all sessions ended")


def test_a_long_prompt_passes_the_whole_path(looping: Looping) -> None:
    """C27: a prompt of 20000 tokens through HTTP, store, drafters and verifier: drafted = plain, and again from the
    prefix cache."""
    prompt = (b"0123456789 ha ha ha \xf0\x9f\x98\x80" * 1400)[: 20_000 - 9] + b" ha ha ha"
    body = {"prompt": list(prompt), "max_tokens": 30, "temperature": 0}
    answers = [choice_of(looping.tree, body | {"num_speculative_tokens": length}) for length in (0, 8)]
    for answer in answers:
        assert answer["token_ids"] == greedy_ids(HA, 30)
        assert answer["usage"]["prompt_tokens"] == 20_000
    assert answers[1]["metrics"]["num_accepted_tokens"] > 20


def test_prompts_that_fit_one_frame_each_need_not_fit_it_together(narrow: System) -> None:
    """C27: four prompts of 10 KB sent in the same turn over links of 16 KiB: each arrives, and no stream breaks."""
    moves = narrow.router.metric("moot_request_moves_total")
    prompt = [200] * 5000 + HA  # ids from 128 on are two bytes each
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "n": 4, "num_speculative_tokens": 4}
    answer = whole(narrow.router, body)
    assert [choice["token_ids"] for choice in answer["choices"]] == [greedy_ids(HA, 12)] * 4
    assert answer["metrics"]["speculative_decoding"]["num_accepted_tokens"] > 0
    assert narrow.router.metric("moot_request_moves_total") == moves


def test_a_prompt_above_the_message_limit_fails_alone(narrow: System) -> None:
    """C27: above the limit of a link a request gets a clean error; its neighbours do not notice."""
    moves = narrow.router.metric("moot_request_moves_total")
    neighbour = Ask(narrow.router.port, ENDLESS | {"max_tokens": 2000})
    neighbour.wait_tokens(1)
    response = post(narrow.router, {"prompt": [200] * 9000, "max_tokens": 4})
    assert NARROW_BYTES < 2 * 9000  # ids from 128 on are two bytes each
    assert response.status_code == 413, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    reply = neighbour.result()
    assert reply.token_ids == greedy_ids(HA, 2000)
    assert narrow.router.metric("moot_request_moves_total") == moves
    narrow.assert_idle()


MIX: tuple[dict[str, Any], ...] = (
    {"prompt": HA, "max_tokens": 30},
    {"prompt": HA, "max_tokens": 40, "stop": " ha ha ha ha ha"},
    {"prompt": HA, "max_tokens": 40, "stop": "h"},
    {"prompt": [*ENDING, *b"12"], "max_tokens": 40},
    {"prompt": [*ENDING, *b"12"], "max_tokens": 40, "min_tokens": 8},
    {"prompt": HA, "max_tokens": 1},
    {"prompt": HA, "max_tokens": 2},
    {"prompt": HA, "max_tokens": 30, "temperature": 1.0, "seed": 1, "n": 3},
    {"prompt": HA, "max_tokens": 20, "num_speculative_tokens": 0},
    {"prompt": HA, "max_tokens": 20, "num_speculative_tokens": 2, "drafters": ["suffix"]},
    {"prompt": [HA, HA], "max_tokens": 20, "temperature": 0.9, "seed": 2},
)


def test_sums_over_requests_are_the_counters(looping: Looping) -> None:
    """C30: what requests report adds up to what the counters gained: cut, ended, sampled, undrafted ones and all."""
    for router in looping.routers:
        looping.system.assert_idle()
        before = samples(router)
        expected: dict[tuple[str, ...], float] = {}

        def add(amount: float, *key: str, into: dict[tuple[str, ...], float] = expected) -> None:
            into[key] = into.get(key, 0) + amount

        for body in MIX:
            answer = whole(router, {"temperature": 0} | body)
            metrics = answer["metrics"]["speculative_decoding"]
            accepted, drafted = metrics["num_accepted_tokens"], metrics["num_draft_tokens"]
            positions = metrics["num_accepted_tokens_per_pos"]
            assert sum(positions) == accepted <= drafted
            assert positions == sorted(positions, reverse=True)
            # Each choice has a first token, and each round a next token unless an end or a stop cut it off.
            choices = len(answer["choices"])
            most = choices + accepted + metrics["num_drafts"]
            assert most - choices <= answer["usage"]["completion_tokens"] <= most
            add(metrics["num_drafts"], "moot_rounds_total")
            add(drafted, "moot_draft_tokens_total")
            add(accepted, "moot_accepted_tokens_total")
            for position, count in enumerate(positions):
                add(count, "moot_accepted_tokens_per_position_total", str(position))
            for name, drafter in metrics["drafters"].items():
                assert drafter["num_accepted_tokens"] <= drafter["num_proposed_tokens"]
                add(drafter["num_proposed_tokens"], "moot_proposal_tokens_total", name)
                add(drafter["num_accepted_tokens"], "moot_proposals_accepted_tokens_total", name)
                add(drafter["num_votes_won"], "moot_votes_won_total", name)
            add(answer["usage"]["completion_tokens"], "moot_generation_tokens_total")
            for choice in answer["choices"]:
                add(1, "moot_requests_total", choice["finish_reason"])
                add(1, "moot_time_to_first_token_seconds_count")
                add(len(choice["token_ids"]) - 1, "moot_inter_token_latency_seconds_count")
        after = samples(router)
        gained = {key: after[key] - before.get(key, 0) for key in expected}
        inexact = "moot_inter_token_latency_seconds_count"  # tokens delivered together with the first have no interval
        assert gained.pop((inexact,)) <= expected.pop((inexact,))
        assert gained == expected
        assert all(math.isfinite(value) or key[-1] == "+Inf" for key, value in after.items())
        assert expected["moot_accepted_tokens_total",] > 0


def test_there_is_no_division_by_zero_before_the_first_request(scripted: Scripted) -> None:
    """C30: a router that has served nothing exports no NaN, and a request without drafting divides by nothing."""
    assert all(not math.isnan(value) for value in samples(scripted.router).values())
    answer = choice_of(scripted.router, {"prompt": HA, "max_tokens": 1, "num_speculative_tokens": 0})
    assert answer["metrics"]["num_drafts"] == answer["metrics"]["num_draft_tokens"] == 0
    assert all(not math.isnan(value) for value in samples(scripted.router).values())


def test_requests_side_by_side_do_not_mix(looping: Looping) -> None:
    """C30, C04: thirty requests at once, each with another prompt, K and length: each text and each count is that of
    the request alone."""
    bodies = [
        {
            "prompt": [*b"12345"[number % 5 :], END_ID, *b"123"] if number % 2 else HA[: 3 + number % 6],
            "max_tokens": 10 + number,
            "num_speculative_tokens": (0, 3, 7, 8)[number % 4],
            "temperature": (0, 0.9)[number % 3 == 0],
            "seed": number,
            "ignore_eos": number % 4 == 1,
            "logprobs": 1,
        }
        for number in range(30)
    ]
    alone = [choice_of(looping.tree, body) for body in bodies]
    with ThreadPoolExecutor(30) as pool:
        batched = list(pool.map(lambda body: choice_of(looping.tree, body), bodies))
    for one, other in zip(alone, batched, strict=True):
        assert {**one, "metrics": 0} == {**other, "metrics": 0} | {"usage": one["usage"]}
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        assert other["metrics"]["num_accepted_tokens"] <= other["metrics"]["num_draft_tokens"]
    assert events(looping.tree, bodies[0], COMPLETIONS)
    assert ids_of(events(looping.tree, bodies[1])) == alone[1]["token_ids"]
