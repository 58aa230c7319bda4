"""The verifier behind real gRPC: frames, heartbeats, ends of streams, limits, drain, a stuck thread, processes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from moot.core.types import Draft, FinishReason, SamplingParams
from moot.rpc import convert
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import LinkConfig, open_channel
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from services.verifier.engine import Engine
from services.verifier.service import SERVICE
from services.verifier.servicer import VerifierServicer
from tests.integration.processes import get
from tests.services.service_process import refusal_of, service_process
from tests.services.verifier.local_sessions import LocalSession
from tests.services.verifier.verifier_driver import MakeEngine, play, run, wish
from tests.waiting import GIVE_UP_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def opening(
    session_id: int, prompt: Sequence[int] = (5,), params: SamplingParams = GREEDY, **fields: Any
) -> pb.VerifyCommand:
    sampling = convert.sampling_to_pb(params)
    opened = pb.OpenSession(request_id="r", prompt_token_ids=prompt, sampling=sampling, **fields)
    return pb.VerifyCommand(session_id=session_id, open=opened)


def verifying(session_id: int, draft: Draft, round_index: int, base: int) -> pb.VerifyCommand:
    return pb.VerifyCommand(session_id=session_id, verify=convert.draft_to_pb(draft, round_index, base))


class Client:
    """One stream to a verifier, frames of commands out, answers in; heartbeats are kept apart."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = pb_grpc.VerifierServiceStub(channel).Verify()
        self.heartbeats: list[pb.Heartbeat] = []
        self._answers: list[pb.VerifyAnswer] = []

    async def send(self, *commands: pb.VerifyCommand) -> None:
        await asyncio.wait_for(self.call.write(pb.VerifyRequest(commands=commands)), GIVE_UP_S)

    async def answer(self) -> pb.VerifyAnswer:
        while not self._answers:
            assert await self.frame() is not grpc.aio.EOF
        return self._answers.pop(0)

    async def ask(self, command: pb.VerifyCommand) -> pb.VerifyAnswer:
        await self.send(command)
        return await self.answer()

    async def ask_all(self, *commands: pb.VerifyCommand) -> dict[int, pb.VerifyAnswer]:
        """One answer for each session that the commands are of."""
        await self.send(*commands)
        answers = [await self.answer() for _ in {command.session_id for command in commands}]
        return {answer.session_id: answer for answer in answers}

    async def status(self) -> grpc.StatusCode:
        """How the stream ends."""
        return await asyncio.wait_for(self.call.code(), GIVE_UP_S)

    async def frame(self) -> pb.VerifyResponse:
        frame = await asyncio.wait_for(self.call.read(), GIVE_UP_S)
        if frame is not grpc.aio.EOF:
            self.heartbeats += [one.heartbeat for one in frame.answers if one.HasField("heartbeat")]
            self._answers += [one for one in frame.answers if not one.HasField("heartbeat")]
        return frame

    async def until(self, condition: Callable[[pb.Heartbeat], bool]) -> pb.Heartbeat:
        while not (self.heartbeats and condition(self.heartbeats[-1])):
            await self.frame()
        return self.heartbeats[-1]


@dataclass(frozen=True)
class Served:
    channel: grpc.aio.Channel
    servicer: VerifierServicer
    address: str


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[Client, Served]]:
    """The first client of a verifier, and what serves it."""
    engine.start()
    servicer = VerifierServicer(engine, engine.config)
    server = GrpcServer(engine.config.link, (SERVICE,))
    pb_grpc.add_VerifierServiceServicer_to_server(servicer, server.server)
    await server.start("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    channel = open_channel(address, engine.config.link)
    try:
        yield Client(channel), Served(channel, servicer, address)
    finally:
        await channel.close()
        await server.stop(0)


async def test_a_request_over_the_wire_equals_plain_decoding(make_engine: MakeEngine) -> None:
    """Chain and tree travel both; the answers repeat session, round and base length."""
    plain = run(make_engine(), [play([5, 6], GREEDY)])[0].output_token_ids
    async with served(make_engine()) as (client, _):
        first = await client.ask(opening(77, [5, 6]))
        assert (first.session_id, first.opened.base_length) == (77, 2)
        output = tuple(first.opened.output_token_ids)
        round_index = 0
        while len(output) < 12:
            round_index += 1
            true = plain[len(output) : len(output) + 3]
            draft = Draft((9, *true), (-1, -1, *range(1, len(true)))) if round_index % 2 else Draft.chain(true)
            answer = await client.ask(verifying(77, draft, round_index, 2 + len(output)))
            assert (answer.session_id, answer.verified.round_index) == (77, round_index)
            assert answer.verified.base_length == 2 + len(output)
            output += tuple(answer.verified.output_token_ids)
        assert output == plain
        assert convert.finish_from_pb(answer.verified.finish_reason) is FinishReason.LENGTH


async def test_a_prompt_is_shared_under_its_salt_only(make_engine: MakeEngine) -> None:
    """The salt of an opening travels: blocks are found again under the salt they were kept under, and no other."""
    async with served(make_engine(prefix_block_tokens=16)) as (client, _):
        cached = []
        for session_id, salt in enumerate(("mine", "mine", "yours", "")):
            answer = await client.ask(opening(session_id, range(40), cache_salt=salt))
            cached.append(answer.opened.num_cached_tokens)
            await client.send(pb.VerifyCommand(session_id=session_id, finish=pb.FinishSession()))
        assert cached == [0, 32, 0, 0]


async def described(server: Served) -> pb.DescribeVerifierResponse:
    stub = pb_grpc.VerifierServiceStub(server.channel)
    return await stub.Describe(pb.DescribeVerifierRequest(), timeout=GIVE_UP_S)


async def test_describe_tells_what_stands_behind_the_address(make_engine: MakeEngine) -> None:
    """Tokenizer, vocabulary, limits and numerics are those of the engine, not of the config alone."""
    engine = make_engine(max_model_len=100, pages=3)
    async with served(engine) as (_, server):
        answer = await described(server)
        assert convert.model_info_from_pb(answer.model) == engine.info
        assert answer.model.context_limit == 100
        assert answer.kv_capacity_tokens == 1536
        assert answer.numerics_fingerprint == engine.runner.numerics_fingerprint
        assert (answer.max_num_seqs, answer.max_draft_tokens, answer.deterministic) == (32, 64, False)


@pytest.mark.parametrize("end", ["half close", "cancel", "channel"])
async def test_a_client_that_goes_away_leaves_nothing(make_engine: MakeEngine, end: str) -> None:
    """C24: a stream that ends without finish or abort, in whatever way, is an abort of all its sessions: seen from
    another stream, neither session nor KV is left."""
    engine = make_engine(heartbeat_interval_s=0.05)
    async with served(engine) as (watcher, server):
        own = open_channel(server.address, engine.config.link)
        client = Client(own)
        await client.send(*(opening(number, [5] * 600) for number in range(1, 9)))
        await client.answer()
        if end == "half close":
            await client.call.done_writing()
            while await client.frame() is not grpc.aio.EOF:
                pass
        elif end == "cancel":
            client.call.cancel()
        else:
            await own.close()
        watcher.heartbeats.clear()
        beat = await watcher.until(lambda beat: beat.num_sessions == 0 and beat.kv_cache_usage_ratio == 0)
        assert beat.num_queued == 0
        assert len(server.servicer._peers) == 1
        await own.close()


async def test_malformed_drafts_on_the_wire_end_their_session_in_order(make_engine: MakeEngine) -> None:
    """Parents that no draft can have: SessionFailed INVALID, the stream and the other sessions live."""
    async with served(make_engine()) as (client, _):
        await client.ask_all(opening(1), opening(2))
        bad = pb.VerifyDraft(round_index=1, base_length=2, draft_token_ids=[1, 2], parent_indices=[-1, 1])
        await client.send(pb.VerifyCommand())  # of a version that this one does not know
        answers = await client.ask_all(
            pb.VerifyCommand(session_id=1, verify=bad), verifying(2, Draft.chain((1,)), 1, 2)
        )
        assert answers[1].failed.code == pb.SessionFailed.CODE_INVALID
        assert answers[1].failed.round_index == 1
        assert answers[2].HasField("verified")


async def test_heartbeats_come_by_themselves_and_when_asked(make_engine: MakeEngine) -> None:
    """They carry the compute thread's counter, which grows while the thread lives, idle or not."""
    engine = make_engine(heartbeat_interval_s=0.05)
    async with served(engine) as (client, _):
        first = await client.until(lambda beat: True)
        await client.until(lambda beat: beat.step_counter > first.step_counter)
        await client.send(pb.VerifyCommand(heartbeat=pb.Heartbeat()), opening(1))
        await client.until(lambda beat: beat.num_sessions == 1 and beat.kv_cache_usage_ratio > 0)


async def test_a_flood_of_commands_ends_its_stream(make_engine: MakeEngine) -> None:
    """More commands than the bound: RESOURCE_EXHAUSTED or UNAVAILABLE for that peer; another one is served."""
    engine = make_engine(max_queued_commands=20)
    async with served(engine) as (flooding, server):
        await flooding.send(*(pb.VerifyCommand(session_id=n, abort=pb.AbortSession()) for n in range(100)))
        assert await flooding.status() is grpc.StatusCode.UNAVAILABLE
        assert (await Client(server.channel).ask(opening(1))).HasField("opened")


async def test_drain_tells_the_peers_and_waits_for_what_runs(make_engine: MakeEngine) -> None:
    """Running sessions end in peace, new ones are refused, late streams are told as well."""
    engine = make_engine(drain_grace_s=7.0)
    async with served(engine) as (client, server):
        await client.ask(opening(1, params=replace(GREEDY, max_tokens=2)))
        drained = asyncio.create_task(server.servicer.drain())
        assert (await client.answer()).drain.grace_ms == 7000
        assert not drained.done()
        assert (await Client(server.channel).answer()).HasField("drain")
        answers = await client.ask_all(opening(2), verifying(1, Draft(), 1, 2))
        assert answers[2].failed.code == pb.SessionFailed.CODE_DRAINING
        assert convert.finish_from_pb(answers[1].verified.finish_reason) is FinishReason.LENGTH
        await asyncio.wait_for(drained, GIVE_UP_S)


def test_an_engine_serves_many_threads(make_engine: MakeEngine) -> None:
    """Eight threads on one engine that runs by itself: plain and drafted texts agree."""
    engine = make_engine(start=True)

    def text(seed: int, known: tuple[int, ...] = ()) -> tuple[int, ...]:
        with LocalSession(engine, [5], replace(GREEDY, temperature=0.7, seed=seed)) as session:
            output = session.open().output_token_ids
            while len(output) < 12:
                output += session.verify(Draft.chain(known[len(output) : len(output) + 4])).output_token_ids
            return output

    with ThreadPoolExecutor(8) as threads:
        plain = list(threads.map(text, range(8)))
        assert list(threads.map(text, range(8), plain)) == plain


async def test_what_could_not_be_answered_in_one_message_is_refused(make_engine: MakeEngine) -> None:
    """An answer above the message limit would end the stream, and with it every other session of its peer."""
    engine = make_engine(max_message_bytes=65536)
    async with served(engine) as (client, _):
        wordy = opening(1, params=replace(GREEDY, logprobs=200))
        curious = opening(2, num_top_candidates=2**32 - 1)
        modest = opening(3, params=replace(GREEDY, logprobs=20), num_top_candidates=8)
        answers = await client.ask_all(wordy, curious, modest)
        for refused in (answers[1], answers[2]):
            assert refused.failed.code == pb.SessionFailed.CODE_INVALID
            assert "at most 63 together" in refused.failed.message
        assert answers[3].HasField("opened")


async def test_a_defect_behind_a_stream_is_told_to_its_peer(make_engine: MakeEngine) -> None:
    """A stream whose commands cannot be taken does not end as if all were well, and leaves no session."""
    engine = make_engine()

    def submit(*_: object) -> None:
        raise RuntimeError("defect")

    engine.submit = submit  # type: ignore[method-assign]
    async with served(engine) as (client, _):
        await client.send(opening(1))
        assert await client.status() is grpc.StatusCode.INTERNAL


async def test_heads_over_the_wire(make_engine: MakeEngine, head_flag: str) -> None:
    """Describe tells them; openings and verifies carry the wish, answers the proposals and what they took."""
    text = random.Random(1).choices(range(200), k=20)
    async with served(make_engine(drafters=(head_flag,))) as (client, server):
        known = (await described(server)).drafters
        assert [(one.drafter_id, one.kind, one.family) for one in known] == [("heads", "heads", "heads")]
        opened = (await client.ask(opening(1, text, **wish("heads", width=2, num_tokens=3)))).opened
        assert [len(one.token_ids) for one in opened.proposals] == [3, 3]
        assert [len(one.confidences) for one in opened.proposals] == [3, 3]
        assert {one.drafter_id for one in opened.proposals} == {"heads"}
        assert opened.timing.inside_us > 0
        for round_index, wanted in ((1, 0), (2, 1)):
            command = verifying(1, Draft(), round_index, len(text) + round_index)
            command.verify.num_inside_tokens = wanted
            answer = (await client.ask(command)).verified
            assert [len(one.token_ids) for one in answer.proposals] == [wanted] * 2 * wanted
            assert (answer.timing.inside_us > 0) == bool(wanted)


# --- a process of its own ------------------------------------------------------------------------------------------

FLAGS = ("--num-threads", "1", "--heartbeat-interval-s", "0.1")


async def test_a_process_from_its_start_to_sigterm(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """C25: with its flag a gateway finds three gauges by vLLM's names, for the model that is served. SIGTERM: readiness
    off first, the running session finishes, a new one is refused, exit status 0. One thread has computed from first to
    last, the one that loaded the model: a second team of OpenMP threads makes steps a quarter slower."""
    folder = model_folder("llama", "float32")
    with service_process(tmp_path, "verifier", "--model", str(folder), *FLAGS, "--vllm-metric-names") as process:
        assert process.probe("/readyz") == process.probe("/livez") == 200
        lines = get(process.metrics_port, "/metrics").text.splitlines()
        names = {line.partition("{")[0] for line in lines if f'model_name="{folder.name}"' in line}
        assert names == {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
        async with open_channel(process.address, LinkConfig()) as channel:
            client = Client(channel)
            await client.ask(opening(1, params=replace(GREEDY, max_tokens=3)))
            process.terminate()
            assert (await client.answer()).HasField("drain")
            assert process.probe("/readyz") == 503
            answers = await client.ask_all(opening(2), verifying(1, Draft(), 1, 2))
            assert answers[2].failed.code == pb.SessionFailed.CODE_DRAINING
            last = await client.ask(verifying(1, Draft(), 2, 3))
            assert convert.finish_from_pb(last.verified.finish_reason) is FinishReason.LENGTH
            assert await asyncio.to_thread(process.wait) == 0
        told = {entry["message"]: entry["thread"] for entry in map(json.loads, process.log.splitlines())}
        assert told["model loaded"] == told["computing"] != told["serving"]


async def test_a_stuck_compute_thread_shows_in_heartbeats_and_liveness(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Heartbeats go on, their counter stands still with work queued, and /livez says no: no ping would tell."""
    flags = ("--model", str(model_folder("llama", "float32")), *FLAGS, "--stall-limit-s", "0.5")
    with service_process(tmp_path, "verifier", *flags, faults="verifier.step=freeze") as process:
        async with open_channel(process.address, LinkConfig()) as channel:
            client = Client(channel)
            await client.send(opening(1))
            await client.until(lambda beat: beat.num_queued > 0)
            del client.heartbeats[:]
            await client.until(lambda beat: len(client.heartbeats) >= 4)
            assert len({beat.step_counter for beat in client.heartbeats}) == 1
            await client.until(lambda beat: process.probe("/livez") == 503)


def test_a_bad_flag_or_model_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    """No traceback for what the operator got wrong."""
    for flags in (("--max-num-batched-tokens", "3"), ()):
        assert refusal_of("verifier", "--model", str(tmp_path), *flags).startswith("error: ")
