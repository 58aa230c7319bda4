"""Measured tables: a verifier driven directly, and the CPU that each process of a running system spends per round."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lab.bench.harness.streams import closed_loop
from lab.bench.harness.watched import cpu_seconds, gained, scrape
from lab.bench.simulate.recorded import Recording
from moot.commands.system import System
from moot.core.types import Draft, SamplingParams, Verification
from moot.rpc import convert
from moot.rpc.link import LinkConfig, open_channel
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc

PREFIX_BLOCK = 64
TOP = 8
_TIMEOUT_S = 60.0


class DirectVerifier:
    """Speaks the wire with a verifier, without a router: all sessions in step with each other."""

    def __init__(self, port: int) -> None:
        self._channel = open_channel(f"127.0.0.1:{port}", LinkConfig())
        self._commands: asyncio.Queue[pb.VerifyRequest] = asyncio.Queue()
        stub = verifier_service_pb2_grpc.VerifierServiceStub(self._channel)
        self._stream: Any = stub.Verify(self._requests())
        self._next_session = 1
        self._lengths: dict[int, int] = {}
        self._rounds: dict[int, int] = {}

    async def _requests(self) -> AsyncIterator[pb.VerifyRequest]:
        while True:
            yield await self._commands.get()

    async def close(self) -> None:
        self._stream.cancel()
        await self._channel.close()

    async def _answers(self, count: int) -> dict[int, Verification]:
        found: dict[int, Verification] = {}
        while len(found) < count:
            frame = await asyncio.wait_for(self._stream.read(), _TIMEOUT_S)
            for answer in frame.answers:
                kind = answer.WhichOneof("answer")
                if kind == "failed":
                    raise RuntimeError(answer.failed.message)
                if kind == "opened":
                    found[answer.session_id] = convert.opened_from_pb(answer.opened)
                elif kind == "verified":
                    found[answer.session_id] = convert.verified_from_pb(answer.verified)
        for session, verification in found.items():
            self._lengths[session] = verification.base_length + len(verification.output_token_ids)
        return found

    async def open(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool
    ) -> dict[int, Verification]:
        commands = []
        for prompt in prompts:
            session = self._next_session
            self._next_session += 1
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
            opening = pb.OpenSession(
                request_id=f"calibrate-{session}",
                prompt_token_ids=prompt,
                sampling=convert.sampling_to_pb(params),
                num_top_candidates=TOP,
            )
            self._rounds[session] = 0
            commands.append(pb.VerifyCommand(session_id=session, open=opening))
        self._commands.put_nowait(pb.VerifyRequest(commands=commands))
        return await self._answers(len(commands))

    async def verify(self, drafts: Mapping[int, Draft]) -> dict[int, Verification]:
        commands = []
        for session, draft in drafts.items():
            message = convert.draft_to_pb(draft, self._rounds[session], self._lengths[session])
            self._rounds[session] += 1
            commands.append(pb.VerifyCommand(session_id=session, verify=message))
        self._commands.put_nowait(pb.VerifyRequest(commands=commands))
        return await self._answers(len(commands))

    def abort(self, sessions: Sequence[int]) -> None:
        commands = [pb.VerifyCommand(session_id=session, abort=pb.AbortSession()) for session in sessions]
        self._commands.put_nowait(pb.VerifyRequest(commands=commands))


async def record(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Recording]:
    """What the target answers, greedily, all prompts at once and without a draft."""
    direct = DirectVerifier(port)
    try:
        answers = await direct.open(prompts, max_tokens, ignore_eos=False)
        # Answers come in any order, sessions are numbered as the prompts are.
        sessions = sorted(answers)
        ids: dict[int, list[int]] = {session: [] for session in sessions}
        tops: dict[int, list[tuple[int, ...]]] = {session: [] for session in sessions}
        while answers:
            for session, verification in answers.items():
                ids[session].extend(verification.output_token_ids)
                tops[session].extend(verification.top_candidates)
            going = [session for session, found in answers.items() if found.finish_reason is None]
            answers = await direct.verify({session: Draft() for session in going}) if going else {}
    finally:
        await direct.close()
    return [
        Recording(
            tuple(prompt),
            tuple(ids[session]),
            tuple(tops[session]),
            (len(prompt) - 1) // PREFIX_BLOCK * PREFIX_BLOCK,
        )
        for prompt, session in zip(prompts, sessions, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class StepTable:
    """`seconds[n]`: (rows of the step, seconds) for n requests whose prefixes are empty, `context_token_s` for each
    token of them; `hop_s`: one way of the wire, both ends' work included but the driver's own."""

    seconds: dict[int, list[tuple[float, float]]]
    prefill_token_s: float
    context_token_s: float
    hop_s: float


class Steps:
    """Steps on a verifier with nothing else to do."""

    def __init__(self, direct: DirectVerifier, num_ids: int, repetitions: int) -> None:
        self._direct, self._num_ids, self._repetitions = direct, num_ids, repetitions
        self.hops: list[float] = []

    async def times(self, prompts: Sequence[Sequence[int]], widths: Sequence[int]) -> list[float]:
        """Medians, in seconds, of steps of one request per prompt with so many rows each; NaN where no step had all."""
        answers = await self._direct.open(prompts, 2000, ignore_eos=True)
        sessions = list(answers)
        found = [await self._time(sessions, width) for width in widths]
        self._direct.abort(sessions)
        return found

    async def _time(self, sessions: Sequence[int], width: int) -> float:
        times: list[float] = []
        for number in range(self._repetitions + 1):
            drafts = {
                session: Draft.chain(
                    tuple((31 * index + number + 7 * session) % self._num_ids for index in range(width - 1))
                )
                for session in sessions
            }
            begin, cpu = time.perf_counter(), time.process_time()
            found = await self._direct.verify(drafts)
            took, cpu = time.perf_counter() - begin, time.process_time() - cpu
            steps = [one for one in found.values() if one.batch_requests == len(sessions)]
            if len(steps) == len(sessions) and number:
                forward_s = steps[0].forward_us * 1e-6
                times.append(forward_s)
                if len(sessions) == 1:
                    self.hops.append(max(took - forward_s - cpu, 0.0) / 2)
        return statistics.median(times) if times else math.nan

    async def first_s(self, token_ids: Sequence[int]) -> float:
        """Of the step that reads a prompt no longer than a chunk."""
        (opened,) = (await self._direct.open([token_ids], 10, ignore_eos=True)).items()
        self._direct.abort([opened[0]])
        return opened[1].forward_us * 1e-6


async def step_table(
    port: int,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[int],
    widths: Sequence[int],
    num_ids: int,
    repetitions: int,
) -> StepTable:
    """Steps of so many requests with so many rows each. `num_ids`: drafts are of ids below it."""
    direct = DirectVerifier(port)
    try:
        steps = Steps(direct, num_ids, repetitions)
        ordered = sorted(prompts, key=len)
        count = max(len(ordered) // 2, 1)
        short, long = ordered[:count], ordered[-count:]
        more = sum(map(len, long)) - sum(map(len, short))
        (short_s,), (long_s,) = await steps.times(short, widths[1:2]), await steps.times(long, widths[1:2])
        context_token_s = max(long_s - short_s, 0.0) / more if more else 0.0
        table = {}
        for count in requests:
            chosen = [prompts[index % len(prompts)] for index in range(count)]
            context_s = context_token_s * sum(map(len, chosen))
            times = await steps.times(chosen, widths)
            table[count] = [
                (float(count * width), max(taken - context_s, taken / 2))
                for width, taken in zip(widths, times, strict=True)
                if not math.isnan(taken)
            ]
        # Ids that no cache holds.
        fresh = [(17 * index + 3) % num_ids for index in range(257)]
        few_s, many_s = await steps.first_s(fresh[:33]), await steps.first_s(fresh[1:])
    finally:
        await direct.close()
    prefill_token_s = max((many_s - few_s) / (256 - 33), 0.0)
    return StepTable(table, prefill_token_s, context_token_s, statistics.median(steps.hops))


@dataclass(frozen=True, slots=True)
class Run:
    """`concurrency` streams over some prompts. CPU in seconds, of each process, over the run. Steps, the requests in
    them and the tokens in them as the verifier counts; `drafted`: rounds that asked the drafters, for `asked_tokens`
    together; `turn_s`: of those the router's own time until its questions and its drafts were written."""

    tokens: int
    elapsed_s: float
    rounds: float
    cpu_s: dict[str, float]
    forward_s: float
    steps: float
    step_requests: float
    step_tokens: float
    drafted: float
    asked_tokens: float
    turn_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s

    @property
    def step_s(self) -> float:
        """Of one forward pass, mean."""
        return self.forward_s / max(self.steps, 1)


def total(runs: Sequence[Run]) -> Run:
    """One after the other. Raises ValueError without runs."""
    if not runs:
        raise ValueError("nothing was run")
    cpu = {name: sum(run.cpu_s.get(name, 0.0) for run in runs) for name in runs[0].cpu_s}
    sums = {field.name: sum(getattr(run, field.name) for run in runs) for field in fields(Run) if field.name != "cpu_s"}
    return Run(cpu_s=cpu, **sums)


def run_load(system: System, model: str, prompts: Sequence[str], concurrency: int, max_tokens: int) -> Run:
    """Each prompt once, `concurrency` at a time, as fast as they are answered. Raises RequestBroken."""
    shared = {"model": model, "temperature": 0, "max_tokens": max_tokens}
    bodies = [(prompt, shared | {"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]
    store = [child for child in system.supervisor.children if child.name == "store"]
    processes = {child.name: child.process.pid for child in (system.router, *system.drafters, *store)}
    ports = [int(child.facts["metrics_port"]) for child in (system.router, system.verifier)]
    before, verifier_before = map(scrape, ports)
    cpu, own = {name: cpu_seconds(pid) for name, pid in processes.items()}, time.process_time()
    replies, elapsed = asyncio.run(closed_loop(system.url, bodies, concurrency))
    spent = {name: cpu_seconds(pid) - cpu[name] for name, pid in processes.items()}
    spent["client"] = time.process_time() - own
    after, verifier_after = map(scrape, ports)
    undrafted = "moot_speculation_length_bucket", "", "0.0"

    def moved(name: str, stage: str = "") -> float:
        return gained(before, after, name, stage)

    def steps(name: str) -> float:
        return gained(verifier_before, verifier_after, name)

    return Run(
        tokens=sum(len(reply.token_ids) for reply in replies),
        elapsed_s=elapsed,
        rounds=moved("moot_rounds_total"),
        cpu_s=spent,
        forward_s=steps("moot_forward_seconds_sum"),
        steps=steps("moot_forward_seconds_count"),
        step_requests=steps("moot_verify_batch_size_sum"),
        step_tokens=steps("moot_verify_batch_tokens_sum"),
        drafted=moved("moot_speculation_length_count") - (after[undrafted] - before.get(undrafted, 0.0)),
        asked_tokens=moved("moot_speculation_length_sum"),
        turn_s=sum(moved("moot_round_turn_seconds_sum", stage) for stage in ("verify", "propose")),
    )


@dataclass(frozen=True, slots=True)
class ProcessCosts:
    """CPU seconds: of each process per round, of the router for asking on top of that, of a drafter per ask.
    `behind`: the part of the router's that follows when its questions are written."""

    round_s: dict[str, float]
    ask_s: float
    drafter_ask_s: dict[str, float]
    behind: float


def process_costs(measured: Mapping[int, Sequence[Run]]) -> dict[int, ProcessCosts]:
    """By concurrency. What asking costs the router is told by runs of one concurrency that asked more and less often:
    the least-squares slope of CPU per round over the share of rounds that asked, one for all. What is behind the
    questions is told by the fewest requests, which do not wait for each other at the router."""
    top = bottom = 0.0
    for runs in measured.values():
        whole = total(runs)
        share, mean = whole.drafted / whole.rounds, whole.cpu_s["router"] / whole.rounds
        for run in runs:
            away = run.drafted / run.rounds - share
            top += run.rounds * away * (run.cpu_s["router"] / run.rounds - mean)
            bottom += run.rounds * away * away
    everything = total([run for runs in measured.values() for run in runs])
    drafters = [name for name in everything.cpu_s if name.startswith("drafter-")]
    drafter_ask_s = {name: everything.cpu_s[name] / max(everything.drafted, 1) for name in drafters}
    alone = total(measured[min(measured)])
    behind = min(max(1 - alone.turn_s / alone.cpu_s["router"], 0.0), 0.8)
    found = {}
    for concurrency, runs in measured.items():
        whole = total(runs)
        round_s = {name: seconds / whole.rounds for name, seconds in whole.cpu_s.items()}
        share = whole.drafted / whole.rounds
        ask_s = min(max(top / bottom, 0.0), round_s["router"]) if bottom else 0.0
        round_s["router"] -= share * ask_s
        found[concurrency] = ProcessCosts(round_s, ask_s, drafter_ask_s, behind)
    return found
