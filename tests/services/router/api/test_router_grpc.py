"""RouterService: the HTTP API's twin over real gRPC, with the same checks, keys, limits and drain."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from moot.core import errors
from moot.core.errors import NoCapacity
from moot.core.noise import choice_seed
from moot.core.types import SamplingParams
from moot.rpc.interceptors import status_of
from moot.testing import ScriptedText, scripted_logprobs
from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc, token_pb2
from services.router.api.auth import ApiKeys
from services.router.api.choices import Choice
from services.router.api.error_responses import describe
from services.router.api.grpc import _response
from services.router.generation.request_types import GenerationChunk
from services.router.store import StoreConfig, open_store
from tests.services.router.api.fronts_rig import TOKENIZER, Fronts, fronts
from tests.services.router.generation.rounds_rig import request, rig
from tests.waiting import GIVE_UP_S, eventually

TEXT = ScriptedText(end_period=200)


@asynccontextmanager
async def served(keys: ApiKeys | None = None, store: Any = None, **settings: Any) -> AsyncIterator[Fronts]:
    async with (
        rig(text=TEXT, step_s=0.001, drafters={"good": 0.3}, store=store) as router,
        fronts(router, keys, **settings) as both,
    ):
        yield both


def expected(prompt: str, seed: int, index: int = 0, **params: Any) -> tuple[int, ...]:
    full = SamplingParams(**{"temperature": 1.0, "max_tokens": 16, "seed": choice_seed(seed, index)} | params)
    return TEXT.plain(prompt.encode(), full)[0]


def ids(responses: list[pb.GenerateResponse], index: int = 0) -> tuple[int, ...]:
    return tuple(token for response in responses if response.choice_index == index for token in response.token_ids)


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


def turns(content: str, role: str = "user") -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content)])


async def test_prompt_chat_and_ids_give_the_target_s_text() -> None:
    """The three inputs are the HTTP API's; defaults are its defaults; the last message has reason and metrics."""
    async with served() as router:
        by_text = await router.call(prompt="hello", seed=5)
        assert ids(by_text) == expected("hello", 5)
        by_ids = await router.call(prompt_token_ids=pb.TokenIds(token_ids=b"hello"), seed=5)
        assert ids(by_ids) == ids(by_text)
        chat = await router.call(chat=turns("hi"), seed=2**64 - 3, max_tokens=20)
        assert ids(chat) == expected("user: hi\nassistant: ", 2**64 - 3, max_tokens=20)
        last = by_text[-1]
        assert last.finish_reason == token_pb2.FINISH_REASON_LENGTH
        assert last.metrics.num_output_tokens == 16
        assert last.metrics.num_prompt_tokens == 5
        assert {drafter.drafter_id for drafter in last.metrics.drafters} == {"good"}
        assert all(not response.HasField("metrics") for response in by_text[:-1])


async def test_parameters_reach_the_target() -> None:
    """n, logprobs, no drafting and the choice of drafters mean what they mean over HTTP."""
    async with served() as router:
        several = await router.call(prompt="hello", seed=9, n=3, max_tokens=30, ignore_eos=True)
        for index in range(3):
            assert ids(several, index) == expected("hello", 9, index, max_tokens=30, ignore_eos=True)
        plain = await router.call(
            prompt="hello", temperature=0, max_tokens=10, num_speculative_tokens=0, logprobs=1, ignore_eos=True
        )
        assert plain[-1].metrics.num_draft_tokens == 0
        entries = [entry for response in plain for entry in response.logprobs]
        for position, (token, entry) in enumerate(zip(ids(plain), entries, strict=True), start=5):
            assert entry.logprob == scripted_logprobs(position, token).logprob
        named = await router.call(prompt="hello", temperature=0, max_tokens=10, ignore_eos=True, drafters=["good"])
        assert ids(named) == ids(plain)
        assert named[-1].metrics.num_draft_tokens > 0


async def test_text_fields_and_ends_are_those_of_http() -> None:
    """What is shown of special tokens and stops, how a chat is written, and why a choice ended."""
    async with served() as router:
        greedy = {"prompt": "hello", "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        plain = await router.call(**greedy)
        assert plain[-1].WhichOneof("stop_reason") is None
        text = text_of(plain)
        stop = next(char for char in text if char != "\ufffd")
        for kept in (False, True):
            cut = await router.call(**greedy, stop=[stop], include_stop_str_in_output=kept)
            assert text_of(cut) == text[: text.index(stop) + kept]
            assert cut[-1].WhichOneof("stop_reason") == "stop_string"
            assert cut[-1].stop_string == stop
        by_id = await router.call(**greedy, stop_token_ids=[ids(plain)[2]])
        assert ids(by_id) == ids(plain)[: ids(plain).index(ids(plain)[2]) + 1]
        assert by_id[-1].finish_reason == token_pb2.FINISH_REASON_STOP
        assert by_id[-1].WhichOneof("stop_reason") == "stop_token_id"
        assert by_id[-1].stop_token_id == ids(plain)[2]

        past_the_end = greedy | {"max_tokens": 210}
        for skipped in (True, False):
            answer = await router.call(**past_the_end, skip_special_tokens=skipped)
            assert TOKENIZER.eos_token_id in ids(answer)
            assert (TOKENIZER.eos_token in text_of(answer)) is not skipped

        asked = {"chat": turns("hi"), "seed": 4}
        bare = await router.call(**asked, max_tokens=9, add_generation_prompt=False)
        assert ids(bare) == expected("user: hi\n", 4, max_tokens=9)
        going_on = await router.call(**asked, max_tokens=9, continue_final_message=True)
        assert ids(going_on) == expected("user: hi", 4, max_tokens=9)

        salts = router.router.verifiers[0].cache_salts
        salts.clear()
        for salt in ("a", "b", "a"):
            await router.call(prompt="hello", cache_salt=salt)
        assert len(salts) == 2


async def test_an_answer_without_a_record_says_so() -> None:
    """With the server of records unreachable the text is the same, and no message is durable."""
    store = await open_store(StoreConfig(url="redis://127.0.0.1:1/0"))
    async with served(store=store) as router:
        answer = await router.call(prompt="hello", seed=5)
        assert ids(answer) == expected("hello", 5)
        assert not any(response.durable for response in answer)
    await store.close()
    choice = Choice(0, request(), text=None, place=None)  # type: ignore[arg-type]  # it has no text of its own to make here
    assert _response(choice, GenerationChunk("a", (1,), durable=True)).durable


_HTTP_CLASS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def test_every_error_is_of_one_class_on_both_fronts() -> None:
    """A caller that retries by status does the same on HTTP and on gRPC, after the same time."""
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.MootError)]
    assert len(classes) > 20
    # Sessions and certificates are between pods: no caller ever has one.
    for cls in set(classes) - {errors.SessionError, errors.UnknownSession, errors.PeerForbidden}:
        error = (
            cls("x", 2.5) if issubclass(cls, errors.NoCapacity | errors.RateLimited | errors.LeaseHeld) else cls("x")
        )
        reply = describe(error)
        assert status_of(error) is _HTTP_CLASS[reply.status], cls
        seconds = error.retry_after_s
        assert reply.headers.get("retry-after") == (None if seconds is None else str(math.ceil(seconds))), cls


async def test_errors_are_status_codes_with_their_field() -> None:
    """INVALID_ARGUMENT with `moot-param`, NOT_FOUND, and the next good call works."""
    async with served() as router:
        for field, fields in (
            ("temperature", {"prompt": "x", "temperature": -1}),
            ("max_tokens", {"prompt": "x", "max_tokens": 0}),
            ("drafters", {"prompt": "x", "drafters": ["nobody"]}),
            ("top_p", {"prompt": "x", "top_p": 0}),
            ("logit_bias", {"prompt": "x", "logit_bias": {999: 1.0}}),
            ("prompt", {"prompt": ""}),
            ("prompt_token_ids", {"prompt_token_ids": pb.TokenIds(token_ids=[999])}),
            ("prompt_token_ids", {"prompt_token_ids": pb.TokenIds()}),
            ("prompt_token_ids", {"prompt_token_ids": pb.TokenIds(token_ids=[1] * 9000)}),
            ("prompt", {"prompt": "x" * 8192}),
            ("chat.messages", {"chat": pb.ChatMessages()}),
            ("chat.messages", {"chat": turns("x" * 8192)}),
            ("chat.messages[0].role", {"chat": turns("x", role="nobody")}),
            ("logprobs", {"chat": turns("x"), "logprobs": 21}),
            ("logprobs", {"prompt": "x", "logprobs": 21}),
            ("continue_final_message", {"prompt": "x", "continue_final_message": True}),
            ("add_special_tokens", {"chat": turns("x"), "add_special_tokens": True}),
            ("input", {}),
        ):
            error = await router.refused(**fields)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert ("moot-param", field) in tuple(error.trailing_metadata() or ()), field
        assert (await router.refused(prompt="x", model="other")).code() is grpc.StatusCode.NOT_FOUND
        assert ids(await router.call(prompt="hello", seed=5)) == expected("hello", 5)


async def test_keys_are_needed_in_the_metadata() -> None:
    """Without a key, or with a wrong one: UNAUTHENTICATED; with a right one: served."""
    async with served(keys=ApiKeys.from_keys(["secret"])) as router:
        assert (await router.refused(prompt="x")).code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await router.refused("wrong", prompt="x")).code() is grpc.StatusCode.UNAUTHENTICATED
        assert await router.call("secret", prompt="x")


async def test_limits_and_drain_are_the_shared_ones() -> None:
    """The caller's limit: RESOURCE_EXHAUSTED. No capacity and draining: UNAVAILABLE, both with `retry-after`."""
    async with served(max_choices_per_key=2) as router:
        busy = await router.refused(prompt="x", n=3)
        assert busy.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        router.state.refused_with = NoCapacity("no verifier can be reached", 7.0)
        nobody = await router.refused(prompt="x")
        assert nobody.code() is grpc.StatusCode.UNAVAILABLE
        assert ("retry-after", "7") in tuple(nobody.trailing_metadata() or ())
        router.state.refused_with = None
        running = asyncio.create_task(router.call(prompt="x", max_tokens=150, ignore_eos=True, seed=1))
        await eventually(lambda: router.router.counter("rounds_total") > 2)
        router.front.admission.draining = True
        assert (await router.refused(prompt="x")).code() is grpc.StatusCode.UNAVAILABLE
        assert ids(await running) == expected("x", 1, max_tokens=150, ignore_eos=True)
        assert await router.front.admission.wait_idle(GIVE_UP_S)


async def test_a_caller_that_goes_frees_everything() -> None:
    """Cancelled calls, at once or after some messages, and those whose own deadline is over leave no session, no place
    and no task."""
    fields = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    async with served() as router:

        async def leave(after: int) -> None:
            call = router.stub.Generate(pb.GenerateRequest(**fields))
            for _ in range(after):
                await call.read()
            call.cancel()

        for _ in range(3):
            await asyncio.gather(*(leave(number % 4) for number in range(10)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in router.stub.Generate(pb.GenerateRequest(**fields), timeout=0.3)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: router.front.admission.num_in_flight == 0)
        assert ids(await router.call(prompt="hello", seed=5)) == expected("hello", 5)


async def test_a_caller_that_reads_nothing_is_dropped() -> None:
    """What it does not take waits for a bounded time only: then its places and sessions are free."""
    async with served(slow_client_timeout_s=1.0) as router:
        router.router.verifiers[0].step_s = 0
        fields = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "logprobs": 20, "n": 4}
        # The transport holds little, so that little has to be generated until it takes no more.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
        async with grpc.aio.insecure_channel(router.address, options) as channel:
            call = router_service_pb2_grpc.RouterServiceStub(channel).Generate(pb.GenerateRequest(**fields))
            await call.read()
            await eventually(lambda: router.front.admission.num_in_flight == 0)
            await router.router.nothing_left()
            assert router.router.counter("requests_total", finish_reason="length") == 0
            assert router.router.counter("requests_total", finish_reason="abort") == 4
        assert ids(await router.call(prompt="hello", seed=5)) == expected("hello", 5)
