"""What a request brings as drafts: its prediction, and the words of its other choices. The text stays the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from moot.core.types import ModelInfo, SamplingParams
from moot.drafters.registry import REQUEST_KINDS, create
from moot.drafters.request.siblings import Siblings
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import LinkConfig
from moot.testing import ScriptedText, byte_tokenizer
from moot.v1 import router_service_pb2 as pb
from moot.v1 import router_service_pb2_grpc
from services.router.api.auth import ApiKeys
from services.router.api.grpc import RouterServicer
from services.router.api.http.app import create_app
from services.router.api.http.http_server import serve_http
from services.router.api.settings import HttpSettings
from services.router.peers.local_drafters import LocalPool
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.api.http_fakes import StaticFrontState
from tests.services.router.generation.rounds_rig import BALLOT, Rig, request, rig
from tests.waiting import GIVE_UP_S

TEXT = ScriptedText(vocab_size=129)
"""Its ids are ASCII, so that the ids of its text are again itself."""
PROMPT = b"the moot debates"


@asynccontextmanager
async def requests_rig(**options: Any) -> AsyncIterator[Rig]:
    """A rig whose drafter set is the drafters that live from requests."""
    async with rig(text=TEXT, **options) as running:
        for kind in REQUEST_KINDS:
            drafter = create(kind, {"vocab_size": running.verifiers[0].info.vocab_size})
            running.drafter_set.sources[kind] = LocalPool(kind, drafter, EjectionPolicy(), running.metrics)
        yield running


def plain(max_tokens: int = 60, **params: Any) -> tuple[int, ...]:
    return TEXT.plain(PROMPT, SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | params)))[0]


def edited(ids: Sequence[int]) -> list[int]:
    """Another id at 20, two more at 35, one less at 50."""
    return [*ids[:20], ids[20] ^ 1, *ids[21:35], 65, 66, *ids[35:50], *ids[51:]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_prediction_takes_few_rounds_and_changes_nothing(temperature: float) -> None:
    """The text is that without it; nearly all of it is accepted from the prediction."""

    async def main() -> None:
        async with requests_rig() as running:
            params = {"temperature": temperature, "seed": 5, "max_tokens": 60}
            ids = plain(**params)
            outcome = await running.generate(request(PROMPT, **params, prediction_token_ids=ids))
            assert outcome.token_ids == ids
            assert outcome.metrics.num_rounds <= 1 + len(ids) // 7
            count = outcome.metrics.drafters["prediction"]
            assert count.num_accepted_tokens == outcome.metrics.num_accepted_tokens > 0.8 * len(ids)
            assert list(outcome.metrics.drafters) == ["prediction"]
            await running.nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_edited_and_foreign_predictions_change_nothing(shape: str, width: int) -> None:
    """Whatever is predicted, the text is the target's; an edited prediction still saves most of the rounds."""

    async def main() -> None:
        tries = replace(BALLOT, width=width)
        async with requests_rig(shape=shape, tries=tries) as running:
            ids = plain()
            for prediction in (edited(ids), ids[::-1], [ids[0]] * 200, [0], list(b"another text altogether")):
                outcome = await running.generate(request(PROMPT, max_tokens=60, prediction_token_ids=tuple(prediction)))
                assert outcome.token_ids == ids
                if prediction == edited(ids):
                    assert outcome.metrics.num_rounds < len(ids) / 2.5
            await running.nothing_left()

    asyncio.run(main())


def test_request_drafters_stand_only_where_they_have_something_to_say() -> None:
    """A request that brings nothing has no such drafter; one that names others, or none, does not get it either."""

    async def main() -> None:
        async with requests_rig() as running:
            assert (await running.generate(request(PROMPT))).metrics.num_draft_tokens == 0
            ids = plain(40)
            for fields in ({"num_speculative_tokens": 0}, {"drafters": ("sibling",)}, {"drafters": ()}):
                outcome = await running.generate(request(PROMPT, prediction_token_ids=ids, **fields))
                assert (outcome.token_ids, outcome.metrics.num_draft_tokens) == (ids, 0)
            named = await running.generate(request(PROMPT, prediction_token_ids=ids, drafters=("prediction",)))
            assert named.metrics.num_accepted_tokens > 30

    asyncio.run(main())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_draft_for_each_other(temperature: float) -> None:
    """Four choices at once say what each says alone; at temperature 0 a later one copies an earlier one."""

    async def main() -> None:
        async with requests_rig() as running:
            siblings = Siblings(4)
            requests = [
                request(
                    PROMPT, temperature=temperature, seed=index, max_tokens=60, siblings=siblings, choice_index=index
                )
                for index in range(4)
            ]
            first = await running.generate(requests[0])
            assert first.metrics.num_draft_tokens == 0
            others = await asyncio.gather(*(running.generate(one) for one in requests[1:]))
            for one, outcome in zip(requests, [first, *others], strict=True):
                assert outcome.token_ids == running.plain(one)[0]
            if temperature == 0.0:
                for outcome in others:
                    assert outcome.metrics.drafters["sibling"].num_accepted_tokens > 40
                    assert outcome.metrics.num_rounds <= 12
            await running.nothing_left()

    asyncio.run(main())


@asynccontextmanager
async def served(running: Rig, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """The HTTP front and the gRPC front of the rig's rounds."""
    info = ModelInfo("scripted", "", "scripted", running.verifiers[0].info.vocab_size, 512, TEXT.end_token_ids)
    app = create_app(
        running.rounds,
        byte_tokenizer(),
        HttpSettings(served_model_names=("scripted",), **settings),
        state=StaticFrontState(info),
        metrics=running.metrics,
    )
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    front = asyncio.create_task(serve_http(app, "127.0.0.1", 0, stop=stop, drain_timeout_s=5, on_ready=port.set_result))
    server = GrpcServer(LinkConfig(), ("moot.v1.RouterService",))
    router_service_pb2_grpc.add_RouterServiceServicer_to_server(
        RouterServicer(app.state.front, ApiKeys()), server.server
    )
    await server.start("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{await asyncio.wait_for(port, GIVE_UP_S)}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=GIVE_UP_S) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            yield client, router_service_pb2_grpc.RouterServiceStub(channel)
    finally:
        stop.set()
        await server.stop(grace_s=1.0)
        await asyncio.wait_for(front, GIVE_UP_S)


BODY = {"prompt": PROMPT.decode(), "max_tokens": 60, "temperature": 0}


def test_usage_tells_what_a_prediction_was_worth() -> None:
    """accepted + rejected = proposed; both stand in the answer and in a stream's last chunk, and only where one was
    sent; they are part of no other count."""

    async def main() -> None:
        async with requests_rig() as running, served(running) as (client, _):
            bare = (await client.post("/v1/completions", json=BODY)).json()
            assert "completion_tokens_details" not in bare["usage"]
            answer = bare["choices"][0]["text"]
            halves = [{"type": "text", "text": half} for half in (answer[:9], answer[9:])]
            worth: list[dict[str, int]] = []
            for content in (answer, halves, "", "nothing like it"):
                body = BODY | {"prediction": {"type": "content", "content": content}, "include_metrics": True}
                whole = (await client.post("/v1/completions", json=body)).json()
                assert whole["choices"] == bare["choices"]
                usage = whole["usage"]
                details = usage.pop("completion_tokens_details")
                assert usage == bare["usage"]
                assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
                drafters = whole["metrics"]["speculative_decoding"]["drafters"]
                count = drafters.get("prediction", {"num_proposed_tokens": 0, "num_accepted_tokens": 0})
                assert sum(details.values()) == count["num_proposed_tokens"]
                assert details["accepted_prediction_tokens"] == count["num_accepted_tokens"]
                worth.append(details)
            assert worth[0] == worth[1]
            assert worth[0]["accepted_prediction_tokens"] > 45
            assert worth[2] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
            assert worth[3]["rejected_prediction_tokens"] > 0
            predicted = {"prediction": {"type": "content", "content": answer}}
            stream = BODY | predicted | {"stream": True, "stream_options": {"include_usage": True}}
            lines = (await client.post("/v1/completions", json=stream)).text.split("\n\n")
            assert '"accepted_prediction_tokens":' in lines[-3].replace(" ", "")

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("size", "code"), [(512, 200), (513, 400), (40_000, 400)], ids=["the context", "one more", "far more"]
)
def test_a_prediction_is_bounded_like_a_prompt(path: str, size: int, code: int) -> None:
    """What could be no answer is refused by its name, before or after it is tokenized; then the next one works."""

    async def main() -> None:
        async with requests_rig() as running, served(running) as (client, _):
            asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
            body = asked | {"max_tokens": 4, "prediction": {"type": "content", "content": "x" * size}}
            answer = await client.post(path, json=body)
            assert answer.status_code == code, answer.text
            if code == 400:
                assert answer.json()["error"]["param"] == "prediction"
                assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200

    asyncio.run(main())


def test_a_prediction_needs_one_prompt() -> None:
    """Of several prompts nobody could say which one it answers."""

    async def main() -> None:
        async with requests_rig() as running, served(running) as (client, _):
            predicted = {"prediction": {"type": "content", "content": "a"}, "prompt": ["a", "b"]}
            answer = await client.post("/v1/completions", json=BODY | predicted)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")

    asyncio.run(main())


def test_choices_of_one_answer_help_each_other_through_http() -> None:
    """n > 1 at temperature 0: the same text n times; each of them may use what the others have said."""

    async def main() -> None:
        async with requests_rig() as running, served(running) as (client, _):
            answer = (await client.post("/v1/completions", json=BODY | {"n": 3, "include_metrics": True})).json()
            texts = {choice["text"] for choice in answer["choices"]}
            assert len(answer["choices"]) == 3
            assert texts == {(await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]}

    asyncio.run(main())


def test_the_official_client_sends_a_prediction_and_reads_its_worth() -> None:
    """Chat, two choices, streamed or not: the counts are where OpenAI's client looks for them."""

    async def main() -> None:
        async with requests_rig() as running, served(running) as (client, _):
            official = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=20)
            asked: Any = {
                "model": "scripted", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "n": 2,
                "max_tokens": 50, "logprobs": True,
            }  # fmt: skip
            bare = await official.chat.completions.create(**asked)
            assert bare.usage.completion_tokens_details is None
            asked["prediction"] = {"type": "content", "content": bare.choices[0].message.content}
            answer = await official.chat.completions.create(**asked)
            assert answer.choices == bare.choices
            details = answer.usage.completion_tokens_details
            assert details.accepted_prediction_tokens > 70
            chunks = await official.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            usage = [chunk.usage async for chunk in chunks][-1]
            # Not the very same numbers: the router has learned what a prediction is worth meanwhile.
            assert usage.completion_tokens_details.accepted_prediction_tokens > 70
            await official.close()

    asyncio.run(main())


def test_grpc_takes_a_prediction() -> None:
    """The same field as a string; the counts are those of the drafter."""

    async def main() -> None:
        async with requests_rig() as running, served(running) as (client, stub):
            text = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
            asked = pb.GenerateRequest(prompt=BODY["prompt"], max_tokens=60, temperature=0, prediction=text)
            parts = [part async for part in stub.Generate(asked, timeout=20)]
            assert "".join(part.text for part in parts) == text
            (count,) = parts[-1].metrics.drafters
            assert count.drafter_id == "prediction"
            assert count.num_accepted_tokens > 45

    asyncio.run(main())
