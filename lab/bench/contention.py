"""Verify time on shared cores: the verifier alone, and beside a router, a store and drafters that are kept busy.

    python -m bench.contention --model PATH [--rounds 60] [--rows 9]

For each way in which compute threads may wait for each other, a verifier verifies drafts of `rows` - 1 tokens over and
over: alone, and while a router is at work for scripted peers (concurrency 4, which never lets it sleep). Verifiers run
one after the other, because one whose threads spin for ever would disturb the rest. `forward` is what the verifier
reports of its step, `answer` what the asking process sees; `idle CPU` is what a verifier without work uses of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lab.bench.driving.routers import cpu_seconds, load, scripted_system
from lab.bench.report import publish, spread
from moot.core.types import Draft, SamplingParams
from moot.rpc import convert
from moot.rpc.link import LinkConfig, open_channel
from moot.runtime.supervisor import Supervisor
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc

CONTEXT = 200
WAITS: dict[str, dict[str, str]] = {
    "sleep at once": {"GOMP_SPINCOUNT": "0"},
    **{f"watch {turns:,} turns": {"GOMP_SPINCOUNT": str(turns)} for turns in (1000, 2000, 4000, 10_000)},
    "watch for ever": {"GOMP_SPINCOUNT": "infinity"},
}
"""Environment of the verifier. libgomp, which torch brings, spins so many turns before a waiting thread sleeps."""
START_TIMEOUT_S = 120.0


async def verify_times(port: int, rows: int, rounds: int) -> list[tuple[float, float]]:
    """(forward ms, answer ms) of each round of one session."""
    found: list[tuple[float, float]] = []
    commands: asyncio.Queue[pb.VerifyCommand] = asyncio.Queue()

    async def requests() -> object:
        while True:
            yield pb.VerifyRequest(commands=[await commands.get()])

    async with open_channel(f"127.0.0.1:{port}", LinkConfig()) as channel:
        stream = verifier_service_pb2_grpc.VerifierServiceStub(channel).Verify(requests())
        prompt = [(7 * index + 13) % 40_000 for index in range(CONTEXT)]
        params = SamplingParams(temperature=0.0, max_tokens=4_000, ignore_eos=True)
        opening = pb.OpenSession(
            request_id="contention", prompt_token_ids=prompt, sampling=convert.sampling_to_pb(params)
        )
        commands.put_nowait(pb.VerifyCommand(session_id=1, open=opening))
        base_length, round_index = CONTEXT + 1, 0
        begin = time.perf_counter()
        async for frame in stream:
            for answer in frame.answers:
                kind = answer.WhichOneof("answer")
                if kind == "failed":
                    raise RuntimeError(answer.failed.message)
                if kind not in ("opened", "verified"):
                    continue
                if kind == "verified":
                    elapsed = 1e3 * (time.perf_counter() - begin)
                    found.append((answer.verified.timing.forward_us / 1e3, elapsed))
                    base_length += len(answer.verified.output_token_ids)
                    round_index += 1
                if len(found) >= rounds:
                    stream.cancel()
                    return found
                draft = Draft.chain(tuple((31 * index + round_index) % 40_000 for index in range(rows - 1)))
                begin = time.perf_counter()
                commands.put_nowait(
                    pb.VerifyCommand(session_id=1, verify=convert.draft_to_pb(draft, round_index, base_length))
                )
    raise RuntimeError("the verifier's stream broke off")


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    """A router kept at work until the block ends."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            asyncio.run(load(url, 4, 256))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rows", type=int, default=9)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    idle: dict[str, list[float]] = {}
    flags = ["--model", arguments.model, "--port", "0", "--metrics-port", "0", "--log-level", "warning"]
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name) / "router") as supervisor:
        router = scripted_system(supervisor, Path(name), num_drafters=3)
        for _ in range(arguments.repetitions):
            for policy, environ in WAITS.items():
                with Supervisor(Path(name) / "verifier") as beside:
                    verifier = beside.service("verifier", "verifier", flags, environ=environ)
                    beside.wait_ready([verifier], START_TIMEOUT_S)
                    for phase in ("alone", "busy"):
                        with busy(f"http://127.0.0.1:{router.port}") if phase == "busy" else contextlib.nullcontext():
                            times = asyncio.run(verify_times(verifier.port, arguments.rows, arguments.rounds))
                        found.setdefault((policy, phase), []).extend(times[5:])
                    idle.setdefault(policy, []).append(idle_cpu(verifier.facts["pid"]))
    rows = []
    for (policy, phase), times in found.items():
        forward, answer = (spread([pair[index] for pair in times]) for index in (0, 1))
        cells = [f"{middle:.1f} ({low:.1f} to {high:.1f})" for middle, low, high in (forward, answer)]
        rows.append((policy, phase, *cells, f"{spread(idle[policy])[0]:.0%}"))
    header = ("compute threads wait", "other processes", "forward ms", "answer ms", "idle CPU")
    facts = {"rows": arguments.rows, "times_ms": {" ".join(key): times for key, times in found.items()}, "idle": idle}
    publish("contention", header, rows, facts)


def idle_cpu(pid: int, seconds: float = 2.0) -> float:
    """Share of a core that the process uses without work."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / seconds


if __name__ == "__main__":
    main()
