"""The verifier behind real gRPC: frames, heartbeats, ends of streams, limits, drain, a stuck thread, processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from moot.core.types import Draft, FinishReason, SamplingParams
from moot.rpc import convert
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import STREAM_ERRORS, LinkConfig, open_channel
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc as pb_grpc
from services.verifier.engine import Engine
from services.verifier.service import SERVICE
from services.verifier.servicer import VerifierServicer
from tests.services.verifier.local_sessions import LocalSession, generate, plain_generate
from tests.services.verifier.verifier_driver import MakeEngine, play, run
from tests.waiting import GIVE_UP_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def opening(session_id: int, prompt: list[int], params: SamplingParams = GREEDY) -> pb.VerifyCommand:
    return pb.VerifyCommand(
        session_id=session_id,
        open=pb.OpenSession(request_id="r", prompt_token_ids=prompt, sampling=convert.sampling_to_pb(params)),
    )


def verifying(session_id: int, draft: Draft, round_index: int, base: int) -> pb.VerifyCommand:
    return pb.VerifyCommand(session_id=session_id, verify=convert.draft_to_pb(draft, round_index, base))


class Client:
    """One stream to a verifier, frames of commands out, answers in; heartbeats are kept apart."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = pb_grpc.VerifierServiceStub(channel).Verify()
        self.heartbeats: list[pb.Heartbeat] = []

    async def send(self, *commands: pb.VerifyCommand) -> None:
        await asyncio.wait_for(self.call.write(pb.VerifyRequest(commands=commands)), GIVE_UP_S)

    async def answers(self, count: int) -> list[pb.VerifyAnswer]:
        found: list[pb.VerifyAnswer] = []
        while len(found) < count:
            frame = await self.frame()
            assert frame is not grpc.aio.EOF
            found += [answer for answer in frame.answers if answer.WhichOneof("answer") != "heartbeat"]
        return found

    async def frame(self) -> pb.VerifyResponse:
        frame = await asyncio.wait_for(self.call.read(), GIVE_UP_S)
        if frame is not grpc.aio.EOF:
            self.heartbeats += [one.heartbeat for one in frame.answers if one.WhichOneof("answer") == "heartbeat"]
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
async def served(engine: Engine) -> AsyncIterator[Served]:
    engine.start()
    servicer = VerifierServicer(engine, engine.config)
    server = GrpcServer(engine.config.link, (SERVICE,))
    pb_grpc.add_VerifierServiceServicer_to_server(servicer, server.server)
    await server.start("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    channel = open_channel(address, engine.config.link)
    try:
        yield Served(channel, servicer, address)
    finally:
        await channel.close()
        await server.stop(0)


def with_server(engine: Engine, body: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(engine) as server:
            await asyncio.wait_for(body(server), GIVE_UP_S)

    asyncio.run(main())


async def nothing_left(client: Client) -> None:
    """Seen from another stream: no session and no KV."""
    beat = await client.until(lambda beat: beat.num_sessions == 0 and beat.kv_cache_usage_ratio == 0)
    assert beat.num_queued == 0


def test_a_request_over_the_wire_equals_plain_decoding(make_engine: MakeEngine) -> None:
    """Chain and tree travel both; the answers repeat session, round and base length."""
    plain = run(make_engine(), [play([5, 6], GREEDY)])[0].output_token_ids

    async def body(server: Served) -> None:
        client = Client(server.channel)
        await client.send(opening(77, [5, 6]))
        (first,) = await client.answers(1)
        assert (first.session_id, first.opened.base_length) == (77, 2)
        output = tuple(first.opened.output_token_ids)
        round_index = 0
        while len(output) < 12:
            round_index += 1
            true = plain[len(output) : len(output) + 3]
            draft = Draft((9, *true), (-1, -1, *range(1, len(true)))) if round_index % 2 else Draft.chain(true)
            await client.send(verifying(77, draft, round_index, 2 + len(output)))
            (answer,) = await client.answers(1)
            assert (answer.session_id, answer.verified.round_index) == (77, round_index)
            assert answer.verified.base_length == 2 + len(output)
            output += tuple(answer.verified.output_token_ids)
        assert output == plain
        assert convert.finish_from_pb(answer.verified.finish_reason) is FinishReason.LENGTH

    with_server(make_engine(), body)


def test_a_prompt_is_shared_under_its_salt_only(make_engine: MakeEngine) -> None:
    """The salt of an opening travels: blocks are found again under the salt they were kept under, and no other."""

    async def body(server: Served) -> None:
        client = Client(server.channel)
        cached = []
        for session_id, salt in enumerate(("mine", "mine", "yours", "")):
            command = opening(session_id, list(range(40)))
            command.open.cache_salt = salt
            await client.send(command)
            (answer,) = await client.answers(1)
            cached.append(answer.opened.num_cached_tokens)
            await client.send(pb.VerifyCommand(session_id=session_id, finish=pb.FinishSession()))
        assert cached == [0, 32, 0, 0]

    with_server(make_engine(prefix_block_tokens=16), body)


def test_describe_tells_what_stands_behind_the_address(make_engine: MakeEngine) -> None:
    """Tokenizer, vocabulary, limits and numerics are those of the engine, not of the config alone."""
    engine = make_engine(max_model_len=100, pages=3)

    async def body(server: Served) -> None:
        answer = await pb_grpc.VerifierServiceStub(server.channel).Describe(
            pb.DescribeVerifierRequest(), timeout=GIVE_UP_S
        )
        assert convert.model_info_from_pb(answer.model) == engine.info
        assert answer.model.context_limit == 100
        assert answer.kv_capacity_tokens == 1536
        assert answer.numerics_fingerprint == engine.runner.numerics_fingerprint
        assert (answer.max_num_seqs, answer.max_draft_tokens, answer.deterministic) == (32, 64, False)

    with_server(engine, body)


@pytest.mark.parametrize("end", ["half close", "cancel", "channel"])
def test_c24_a_client_that_goes_away_leaves_nothing(make_engine: MakeEngine, end: str) -> None:
    """A stream that ends without finish or abort, in whatever way, is an abort of all its sessions."""
    engine = make_engine(heartbeat_interval_s=0.05)

    async def body(server: Served) -> None:
        watcher = Client(server.channel)
        own = open_channel(server.address, engine.config.link)
        client = Client(own)
        await client.send(*(opening(number, [5] * 600) for number in range(1, 9)))
        await client.answers(1)
        if end == "half close":
            await client.call.done_writing()
            while await client.frame() is not grpc.aio.EOF:
                pass
        elif end == "cancel":
            client.call.cancel()
        else:
            await own.close()
        watcher.heartbeats.clear()
        await nothing_left(watcher)
        assert len(server.servicer._peers) == 1
        await own.close()

    with_server(engine, body)


def test_c27_big_frames_pass_and_too_big_ones_are_a_clean_error(make_engine: MakeEngine) -> None:
    """A frame above gRPC's default of 4 MiB arrives; one above the limit ends its own stream, and others go on."""
    engine = make_engine()

    async def body(server: Served) -> None:
        client = Client(server.channel)
        big = opening(1, [200] * 3_000_000)  # two bytes an id
        assert big.ByteSize() > 5 * 1024 * 1024
        await client.send(big, opening(2, [5]))
        answers = {answer.session_id: answer for answer in await client.answers(2)}
        assert answers[1].failed.code == pb.SessionFailed.CODE_INVALID
        assert "3000000 tokens" in answers[1].failed.message
        assert answers[2].HasField("opened")
        other = Client(server.channel)
        huge = opening(1, [200] * 9_000_000)
        with suppress(*STREAM_ERRORS):
            await other.send(huge)
        assert await other.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await client.send(verifying(2, Draft(), 1, 2))
        (answer,) = await client.answers(1)
        assert answer.HasField("verified")

    with_server(engine, body)


def test_malformed_drafts_on_the_wire_end_their_session_in_order(make_engine: MakeEngine) -> None:
    """Parents that no draft can have: SessionFailed INVALID, the stream and the other sessions live."""

    async def body(server: Served) -> None:
        client = Client(server.channel)
        await client.send(opening(1, [5]), opening(2, [5]))
        await client.answers(2)
        bad = pb.VerifyDraft(round_index=1, base_length=2, draft_token_ids=[1, 2], parent_indices=[-1, 1])
        await client.send(
            pb.VerifyCommand(session_id=1, verify=bad), verifying(2, Draft.chain((1,)), 1, 2), pb.VerifyCommand()
        )
        answers = {answer.session_id: answer for answer in await client.answers(2)}
        assert answers[1].failed.code == pb.SessionFailed.CODE_INVALID
        assert answers[1].failed.round_index == 1
        assert answers[2].HasField("verified")

    with_server(make_engine(), body)


def test_heartbeats_come_by_themselves_and_when_asked(make_engine: MakeEngine) -> None:
    """They carry the compute thread's counter, which grows while the thread lives, idle or not."""
    engine = make_engine(heartbeat_interval_s=0.05)

    async def body(server: Served) -> None:
        client = Client(server.channel)
        first = await client.until(lambda beat: True)
        await client.until(lambda beat: beat.step_counter > first.step_counter)
        await client.send(pb.VerifyCommand(heartbeat=pb.Heartbeat()), opening(1, [5]))
        await client.until(lambda beat: beat.num_sessions == 1 and beat.kv_cache_usage_ratio > 0)

    with_server(engine, body)


def test_a_flood_of_commands_ends_its_stream(make_engine: MakeEngine) -> None:
    """More commands than the bound: RESOURCE_EXHAUSTED or UNAVAILABLE for that peer; another one is served."""
    engine = make_engine(max_queued_commands=20)

    async def body(server: Served) -> None:
        flooding, good = Client(server.channel), Client(server.channel)
        await flooding.send(*(pb.VerifyCommand(session_id=n, abort=pb.AbortSession()) for n in range(100)))
        assert await asyncio.wait_for(flooding.call.code(), GIVE_UP_S) is grpc.StatusCode.UNAVAILABLE
        await good.send(opening(1, [5]))
        (answer,) = await good.answers(1)
        assert answer.HasField("opened")

    with_server(engine, body)


def test_drain_tells_the_peers_and_waits_for_what_runs(make_engine: MakeEngine) -> None:
    """Running sessions end in peace, new ones are refused, late streams are told as well."""
    engine = make_engine(drain_grace_s=7.0)

    async def body(server: Served) -> None:
        client = Client(server.channel)
        await client.send(opening(1, [5], replace(GREEDY, max_tokens=2)))
        await client.answers(1)
        drained = asyncio.create_task(server.servicer.drain())
        (told,) = await client.answers(1)
        assert told.drain.grace_ms == 7000
        assert not drained.done()
        (late,) = await Client(server.channel).answers(1)
        assert late.HasField("drain")
        await client.send(opening(2, [5]), verifying(1, Draft(), 1, 2))
        refused, last = sorted(await client.answers(2), key=lambda answer: -answer.session_id)
        assert refused.failed.code == pb.SessionFailed.CODE_DRAINING
        assert last.verified.output_token_ids
        await asyncio.wait_for(drained, GIVE_UP_S)

    with_server(engine, body)


def test_the_local_api_serves_many_threads(make_engine: MakeEngine) -> None:
    """Eight threads on one engine: plain and drafted texts agree, and errors are the tree's."""
    from concurrent.futures import ThreadPoolExecutor

    from moot.core.errors import InvalidRequest

    engine = make_engine(start=True)
    params = [replace(GREEDY, temperature=0.7, seed=number) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        plain = list(threads.map(lambda own: plain_generate(engine, [5], own), params))
        texts = [one.output_token_ids for one in plain]
        jobs = zip(params, texts, strict=True)
        drafted = threads.map(
            lambda job: generate(engine, [5], job[0], lambda out: Draft.chain(job[1][len(out) : len(out) + 4])), jobs
        )
        assert [one.output_token_ids for one in drafted] == texts
    with LocalSession(engine, [], GREEDY) as session, pytest.raises(InvalidRequest, match="empty"):
        session.open()


# --- a process of its own ------------------------------------------------------------------------------------------


@asynccontextmanager
async def process(
    folder: Path, tmp_path: Path, *flags: str, **environ: str
) -> AsyncIterator[tuple[object, dict[str, int]]]:
    ready = tmp_path / "ready.json"
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.verifier", "--model", str(folder), "--port", "0", "--metrics-port", "0"),
        *("--ready-file", str(ready), "--num-threads", "1", "--heartbeat-interval-s", "0.1", *flags),
        env={**os.environ, **environ},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(GIVE_UP_S):
            while not ready.exists() and child.returncode is None:  # noqa: ASYNC110 - a file says it, no event does
                await asyncio.sleep(0.05)
        assert child.returncode is None
        yield child, json.loads(ready.read_text())
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def status_of(port: int, path: str) -> int:
    return (await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{port}{path}", timeout=GIVE_UP_S)).status_code


def test_a_flag_adds_vllms_names_to_the_metrics(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A gateway that scrapes the process finds its three gauges under the name of the model that is served."""

    async def main() -> None:
        folder = model_folder("llama", "float32")
        async with process(folder, tmp_path, "--vllm-metric-names") as (_, ports):
            url = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
            lines = (await asyncio.to_thread(httpx.get, url, timeout=GIVE_UP_S)).text.splitlines()
        names = {line.partition("{")[0] for line in lines if f'model_name="{folder.name}"' in line}
        assert names == {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}

    asyncio.run(main())


def test_c25_sigterm_drains_a_process(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Readiness off first, the running session finishes, a new one is refused, exit status 0."""

    async def main() -> None:
        async with process(model_folder("llama", "float32"), tmp_path) as (child, ports):
            assert await status_of(ports["metrics_port"], "/readyz") == 200
            assert await status_of(ports["metrics_port"], "/livez") == 200
            channel = open_channel(f"127.0.0.1:{ports['port']}", LinkConfig())
            client = Client(channel)
            await client.send(opening(1, [5], replace(GREEDY, max_tokens=3)))
            await client.answers(1)
            child.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
            (told,) = await client.answers(1)
            assert told.HasField("drain")
            assert await status_of(ports["metrics_port"], "/readyz") == 503
            await client.send(opening(2, [5]), verifying(1, Draft(), 1, 2))
            answers = {answer.session_id: answer for answer in await client.answers(2)}
            assert answers[2].failed.code == pb.SessionFailed.CODE_DRAINING
            await client.send(verifying(1, Draft(), 2, 3))
            (last,) = await client.answers(1)
            assert convert.finish_from_pb(last.verified.finish_reason) is FinishReason.LENGTH
            assert await asyncio.wait_for(child.wait(), GIVE_UP_S) == 0  # type: ignore[attr-defined]
            await channel.close()

    asyncio.run(main())


def test_a_stuck_compute_thread_shows_in_heartbeats_and_liveness(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Heartbeats go on, their counter stands still with work queued, and /livez says no: no ping would tell."""

    async def main() -> None:
        folder = model_folder("llama", "float32")
        flags = ("--stall-limit-s", "0.5")
        async with process(folder, tmp_path, *flags, MOOT_FAULTS="verifier.step=freeze") as (_, ports):
            channel = open_channel(f"127.0.0.1:{ports['port']}", LinkConfig())
            client = Client(channel)
            await client.send(opening(1, [5]))
            await client.until(lambda beat: beat.num_queued > 0)
            del client.heartbeats[:]
            await client.until(lambda beat: len(client.heartbeats) >= 4)
            assert len({beat.step_counter for beat in client.heartbeats}) == 1
            async with asyncio.timeout(GIVE_UP_S):
                while await status_of(ports["metrics_port"], "/livez") != 503:
                    await client.frame()
            await channel.close()

    asyncio.run(main())


def test_the_model_is_loaded_by_the_thread_that_computes(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """One thread computes from first to last: a second team of OpenMP threads makes steps a quarter slower."""

    async def main() -> None:
        argv = (sys.executable, "-m", "services.verifier", "--model", str(model_folder()), "--port", "0")
        ready = tmp_path / "ready.json"
        child = await asyncio.create_subprocess_exec(
            *argv, "--metrics-port", "0", "--ready-file", str(ready), stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(GIVE_UP_S):
                assert child.stderr is not None
                lines = []
                async for line in child.stderr:
                    lines.append(json.loads(line))
                    if lines[-1]["message"] == "serving":
                        child.terminate()
                assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
        threads = {entry["message"]: entry["thread"] for entry in lines}
        assert threads["model loaded"] == threads["computing"] != threads["serving"]

    asyncio.run(main())


def test_a_bad_flag_or_model_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    """No traceback for what the operator got wrong."""

    async def main() -> None:
        for flags in (("--max-num-batched-tokens", "3"), ("--model", str(tmp_path))):
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.verifier", "--model", str(tmp_path), *flags),
                stderr=asyncio.subprocess.PIPE,
            )
            _, text = await asyncio.wait_for(child.communicate(), 60)
            assert child.returncode == 2
            assert b"Traceback" not in text
            assert text.splitlines()[-1].startswith(b"error: ")

    asyncio.run(main())


def test_what_could_not_be_answered_in_one_message_is_refused(make_engine: MakeEngine) -> None:
    """An answer above the message limit would end the stream, and with it every other session of its peer."""
    engine = make_engine(max_message_bytes=65536)

    async def body(server: Served) -> None:
        client = Client(server.channel)
        wordy, curious = opening(1, [5], replace(GREEDY, logprobs=200)), opening(2, [5])
        curious.open.num_top_candidates = 2**32 - 1
        modest = opening(3, [5], replace(GREEDY, logprobs=20))
        modest.open.num_top_candidates = 8
        await client.send(wordy, curious, modest)
        answers = {answer.session_id: answer for answer in await client.answers(3)}
        for refused in (answers[1], answers[2]):
            assert refused.failed.code == pb.SessionFailed.CODE_INVALID
            assert "at most 63 together" in refused.failed.message
        assert answers[3].HasField("opened")

    with_server(engine, body)


def test_a_defect_behind_a_stream_is_told_to_its_peer(make_engine: MakeEngine) -> None:
    """A stream whose commands cannot be taken does not end as if all were well, and leaves no session."""
    engine = make_engine()

    def submit(*_: object) -> None:
        raise RuntimeError("defect")

    engine.submit = submit  # type: ignore[method-assign]

    async def body(server: Served) -> None:
        client = Client(server.channel)
        await client.send(opening(1, [5]))
        assert await asyncio.wait_for(client.call.code(), GIVE_UP_S) is grpc.StatusCode.INTERNAL

    with_server(engine, body)
