"""What a request brings as drafts: its prediction, and the words of its other choices. The text stays the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from moot.core.types import SamplingParams
from moot.drafters.registry import REQUEST_KINDS
from moot.drafters.request.siblings import Siblings
from moot.testing import ScriptedText, ScriptedVerifier
from tests.services.router.api.fronts_rig import Fronts, fronts
from tests.services.router.generation.rounds_rig import BALLOT, Rig, request, rig

TEXT = ScriptedText(vocab_size=129)
"""Its ids are ASCII, so that the ids of its text are again itself."""
PROMPT = b"the moot debates"


@asynccontextmanager
async def requests_rig(**options: Any) -> AsyncIterator[Rig]:
    """A rig whose drafter set is the drafters that live from requests."""
    async with rig(text=TEXT, verifiers=[ScriptedVerifier(TEXT, context_limit=512)], **options) as running:
        for kind in REQUEST_KINDS:
            running.add_local(kind)
        yield running


@asynccontextmanager
async def requests_fronts() -> AsyncIterator[Fronts]:
    async with requests_rig() as running, fronts(running) as both:
        yield both


def plain(max_tokens: int = 60, **params: Any) -> tuple[int, ...]:
    return TEXT.plain(PROMPT, SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | params)))[0]


def edited(ids: Sequence[int]) -> list[int]:
    """Another id at 20, two more at 35, one less at 50."""
    return [*ids[:20], ids[20] ^ 1, *ids[21:35], 65, 66, *ids[35:50], *ids[51:]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_right_prediction_takes_few_rounds_and_changes_nothing(temperature: float) -> None:
    """The text is that without it; nearly all of it is accepted from the prediction."""
    async with requests_rig() as running:
        params = {"temperature": temperature, "seed": 5, "max_tokens": 60}
        ids = plain(**params)
        outcome = await running.check(request(PROMPT, **params, prediction_token_ids=ids))
        assert outcome.metrics.num_rounds <= 1 + len(ids) // 7
        count = outcome.metrics.drafters["prediction"]
        assert count.num_accepted_tokens == outcome.metrics.num_accepted_tokens > 0.8 * len(ids)
        assert list(outcome.metrics.drafters) == ["prediction"]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("shape", ["chain", "tree"])
async def test_edited_and_foreign_predictions_change_nothing(shape: str, width: int) -> None:
    """Whatever is predicted, the text is the target's; an edited prediction still saves most of the rounds."""
    async with requests_rig(shape=shape, tries=replace(BALLOT, width=width)) as running:
        ids = plain()
        for prediction in (edited(ids), ids[::-1], [ids[0]] * 200, [0], list(b"another text altogether")):
            outcome = await running.check(request(PROMPT, max_tokens=60, prediction_token_ids=tuple(prediction)))
            if prediction == edited(ids):
                assert outcome.metrics.num_rounds < len(ids) / 2.5


async def test_request_drafters_stand_only_where_they_have_something_to_say() -> None:
    """A request that brings nothing has no such drafter; one that names others, or none, does not get it either."""
    async with requests_rig() as running:
        assert (await running.generate(request(PROMPT))).metrics.num_draft_tokens == 0
        ids = plain(40)
        for fields in ({"num_speculative_tokens": 0}, {"drafters": ("sibling",)}, {"drafters": ()}):
            outcome = await running.generate(request(PROMPT, prediction_token_ids=ids, **fields))
            assert (outcome.token_ids, outcome.metrics.num_draft_tokens) == (ids, 0)
        named = await running.generate(request(PROMPT, prediction_token_ids=ids, drafters=("prediction",)))
        assert named.metrics.num_accepted_tokens > 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_choices_draft_for_each_other(temperature: float) -> None:
    """Four choices at once say what each says alone; at temperature 0 a later one copies an earlier one."""
    async with requests_rig() as running:
        siblings = Siblings(4)
        requests = [
            request(PROMPT, temperature=temperature, seed=index, max_tokens=60, siblings=siblings, choice_index=index)
            for index in range(4)
        ]
        first = await running.check(requests[0])
        assert first.metrics.num_draft_tokens == 0
        others = await running.check_all(requests[1:])
        if temperature == 0.0:
            for outcome in others:
                assert outcome.metrics.drafters["sibling"].num_accepted_tokens > 40
                assert outcome.metrics.num_rounds <= 12


BODY = {"prompt": PROMPT.decode(), "max_tokens": 60, "temperature": 0}


async def test_usage_tells_what_a_prediction_was_worth() -> None:
    """accepted + rejected = proposed; both stand in the answer and in a stream's last chunk, and only where one was
    sent; they are part of no other count."""
    async with requests_fronts() as router:
        bare = (await router.post(BODY)).json()
        assert "completion_tokens_details" not in bare["usage"]
        answer = bare["choices"][0]["text"]
        halves = [{"type": "text", "text": half} for half in (answer[:9], answer[9:])]
        worth: list[dict[str, int]] = []
        for content in (answer, halves, "", "nothing like it"):
            body = BODY | {"prediction": {"type": "content", "content": content}, "include_metrics": True}
            whole = (await router.post(body)).json()
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
        lines = (await router.post(stream)).text.split("\n\n")
        assert '"accepted_prediction_tokens":' in lines[-3].replace(" ", "")


async def test_a_prediction_is_bounded_like_a_prompt_and_needs_one() -> None:
    """What could be no answer is refused by its name, before or after it is tokenized, and so is what answers one of
    several prompts, nobody could say which; then the next one works."""
    prompt, chat = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
    async with requests_fronts() as router:

        async def answer(asked: dict[str, Any], path: str, size: int) -> tuple[int, Any]:
            body = asked | {"max_tokens": 4, "prediction": {"type": "content", "content": "x" * size}}
            response = await router.post(body, path)
            return response.status_code, response.json().get("error")

        for asked, path in ((prompt, "/v1/completions"), (chat, "/v1/chat/completions")):
            assert await answer(asked, path, 512) == (200, None)
            for size in (513, 40_000):
                status, error = await answer(asked, path, size)
                assert (status, error["param"], error["code"]) == (400, "prediction", "context_length_exceeded")
        status, error = await answer({"prompt": ["a", "b"]}, "/v1/completions", 1)
        assert (status, error["param"]) == (400, "prediction")
        assert (await router.post(BODY)).status_code == 200


async def test_choices_of_one_answer_help_each_other_through_http() -> None:
    """n > 1 at temperature 0: the same text n times; each of them may use what the others have said."""
    async with requests_fronts() as router:
        answer = (await router.post(BODY | {"n": 3, "include_metrics": True})).json()
        texts = {choice["text"] for choice in answer["choices"]}
        assert len(answer["choices"]) == 3
        assert texts == {(await router.post(BODY)).json()["choices"][0]["text"]}


async def test_the_official_client_sends_a_prediction_and_reads_its_worth() -> None:
    """Chat, two choices, streamed or not: the counts are where OpenAI's client looks for them."""
    async with requests_fronts() as router:
        official = openai.AsyncOpenAI(base_url="http://router/v1", api_key="none", http_client=router.client)
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
        chunks = await official.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        usage = [chunk.usage async for chunk in chunks][-1]
        # Not the very same numbers: the router has learned what a prediction is worth meanwhile.
        assert usage.completion_tokens_details.accepted_prediction_tokens > 70


async def test_grpc_takes_a_prediction() -> None:
    """The same field as a string; the counts are those of the drafter."""
    async with requests_fronts() as router:
        text = (await router.post(BODY)).json()["choices"][0]["text"]
        parts = await router.call(**BODY, prediction=text)
        assert "".join(part.text for part in parts) == text
        (count,) = parts[-1].metrics.drafters
        assert count.drafter_id == "prediction"
        assert count.num_accepted_tokens > 45
