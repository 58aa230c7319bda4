"""What callers who are refused cost those who are served: the whole system at capacity and at four times that.

    python -m lab.bench.overload [--repetitions 4] [--seconds 2.5] [--seqs 8] [--step-ms 20]

At capacity: as many callers as there are places, running (`seqs`) and waiting (as many again), each asking anew when it
has its answer; nobody is refused. At four times that: four times as many; who is refused comes again when the answer
says. Both in turns, and the ratio is taken within each pair of turns. A tiny random model, whose step is made to last
as long as a large one's by the fault point `verifier.step`, with model-free drafters in the router and K fixed at 3;
before the pairs a few callers alone show that rounds draft. At the end 4,000 requests, after as many whose memory the
process keeps for later ones, are refused in a row while the router is full, and its memory is read between them.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.harness.arms import Arm, Runs, in_turns
from lab.bench.harness.intervals import theil_sen
from lab.bench.harness.pages import Bench, BenchConfig, Table
from lab.bench.harness.streams import Reply, RequestBroken, ask
from lab.bench.harness.systems import tiny
from lab.bench.harness.watched import gained, memory_of, scrape
from moot.commands.common import say
from moot.commands.system import System, SystemConfig, running
from moot.config import option, variable_of

BENCH = Bench("overload", __doc__, measures=("services/router", "services/verifier", "moot/core"))
HEADER = ("what", "at capacity", "at 4 times capacity", "ratio (95 %)", "bound", "verdict")
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
LETTERS = list(b"abcdefgh")
TIMES = 4
IMPATIENT = 12
"""Callers who ask again at once when they are refused, at the end."""
REFUSAL_BOUND_MS = 50


@dataclass(frozen=True, kw_only=True)
class Config(SystemConfig, BenchConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    drafters: tuple[str, ...] = option(("suffix", "prompt_lookup"), help="[id=]kind[:option=value]... each")
    num_threads: int = option(1, help="the verifier's compute threads; 0: one per core")
    repetitions: int = option(4, help="turns at capacity, and as many at four times that")
    seconds: float = option(2.5, help="seconds in which callers ask, of each turn")
    seqs: int = option(8, help="requests in the verifier's batch, and as many again may wait")
    step_ms: float = option(20.0, help="milliseconds that a step takes beside the tiny model's own")
    refusals: int = option(4000, help="requests refused in a row at the end")
    warm_up: int = option(4000, help="requests refused before them")


@dataclass(slots=True)
class Turn:
    """What one turn's callers saw. Seconds."""

    served: list[Reply] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    drafted_share: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        return {
            "first_token_ms": 1e3 * statistics.median(reply.first_token_s for reply in self.served),
            "token_gap_ms": 1e3 * statistics.fmean(gap for reply in self.served for gap in reply.token_gaps),
            "answers": len(self.served),
            "refused": len(self.refusals),
            "drafted_per_round": self.drafted_share,
        }


class Callers:
    def __init__(self, system: System, config: Config) -> None:
        self._system = system
        self._config = config
        self._model = system.client.models()[0]
        self._count = 0
        self._draw = random.Random(1)

    async def ask(self) -> tuple[Reply, float]:
        """With the seconds until all of the answer was there. Raises RequestBroken for what is neither served nor
        refused."""
        self._count += 1
        number = self._count
        prompt = [LETTERS[(number * place * place + place) % 8] for place in range(PROMPT_TOKENS)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0.7, "seed": number}
        body |= {"allowed_token_ids": LETTERS, "ignore_eos": True, "num_speculative_tokens": 3}
        reply = await ask(self._system.url, body, name="overload", chat=False)
        seconds = time.monotonic() - reply.sent
        if reply.status not in (200, 429, 503) or (reply.status == 200 and not reply.is_whole):
            raise RequestBroken(f"HTTP {reply.status} {reply.error}")
        return reply, seconds

    async def turn(self, num_callers: int) -> Turn:
        """So many callers for a while; each finishes what it has begun."""
        turn = Turn()
        port = int(self._system.router.facts["metrics_port"])
        end = time.monotonic() + self._config.seconds

        async def watch() -> None:
            """Leaves out the beginning and the end, in which fewer ask than are meant to."""
            await asyncio.sleep(self._config.seconds / 4)
            before = await asyncio.to_thread(scrape, port)
            await asyncio.sleep(end - time.monotonic())
            after = await asyncio.to_thread(scrape, port)
            rounds = gained(before, after, "moot_rounds_total")
            turn.drafted_share = gained(before, after, "moot_draft_tokens_total") / max(rounds, 1.0)

        async def one() -> None:
            while time.monotonic() < end:
                reply, seconds = await self.ask()
                if reply.status == 200:
                    turn.served.append(reply)
                else:
                    turn.refusals.append(seconds)
                    turn.waits.append(reply.retry_after_s)
                    # Not all at the same moment, as no client should.
                    pause = reply.retry_after_s * (1 + self._draw.random() / 2)
                    await asyncio.sleep(max(0.0, min(pause, end - time.monotonic())))

        async with asyncio.TaskGroup() as group:
            for _ in range(num_callers):
                group.create_task(one())
            group.create_task(watch())
        return turn

    async def refuse(self, count: int) -> list[tuple[int, int]]:
        """Refuse so many, as quickly as a few callers too many can ask: (refusals so far, the router's resident
        bytes) after the warm-up."""
        pid = self._system.router.process.pid
        sizes: list[tuple[int, int]] = []
        refused = -self._config.warm_up

        async def one() -> None:
            nonlocal refused
            while refused < count:
                reply, _ = await self.ask()
                if reply.status == 200:
                    continue
                refused += 1
                if refused >= 0 and refused % 50 == 0:
                    sizes.append((refused, memory_of(pid)[0]))

        async with asyncio.TaskGroup() as group:
            for _ in range(2 * self._config.seqs + IMPATIENT):
                group.create_task(one())
        return sizes


AT, ABOVE = "at capacity", f"{TIMES} times that"


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    os.environ |= {
        "MOOT_FAULTS": f"verifier.step=delay:{config.step_ms / 1000:g}",
        variable_of("max_num_seqs"): str(config.seqs),
        variable_of("max_waiting_seqs"): str(config.seqs),
    }
    arms = [Arm(AT, {"callers": 2 * config.seqs}), Arm(ABOVE, {"callers": TIMES * 2 * config.seqs})]
    above: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="moot-") as folder:
        config = tiny(config, Path(folder))
        with running(config, "overload", say) as system:
            callers = Callers(system, config)
            few = asyncio.run(callers.turn(2))

            def take(arm: Arm) -> dict[str, float]:
                system.supervisor.check()
                turn = asyncio.run(callers.turn(arm.differs["callers"]))
                if arm.name == ABOVE:
                    above.append(turn)
                say(f"{arm.name}: {turn.figures}")
                return turn.figures

            runs = Runs(in_turns(arms, take, config.repetitions, warm_up=0))
            sizes = asyncio.run(callers.refuse(config.refusals))
    report(config, few, runs, above, sizes, argv)
    return 0


def report(
    config: Config,
    few: Turn,
    runs: Runs,
    above: Sequence[Turn],
    sizes: Sequence[tuple[int, int]],
    argv: Sequence[str] | None,
) -> None:
    refusals = sorted(1e3 * took for turn in above for took in turn.refusals)
    waits = [wait for turn in above for wait in turn.waits]
    slope = theil_sen([count for count, _ in sizes], [size for _, size in sizes])
    quick = refusals[min(len(refusals) - 1, int(0.99 * len(refusals)))]

    def medians(what: str, key: str, digits: int) -> list[str]:
        return [what, *(f"{runs.interval(arm, key).median:.{digits}f}" for arm in (AT, ABOVE))]

    def bounded(what: str, key: str, digits: int, **bound: float) -> list[str]:
        ratio, ((kind, most),) = runs.ratio(ABOVE, AT, key), bound.items()
        return [*medians(what, key, digits), ratio.text(), f"{kind.replace('_', ' ')} {most}", ratio.verdict(**bound)]

    rows = [
        bounded("first token, ms", "first_token_ms", 0, at_most=1.25),
        bounded("between tokens, ms", "token_gap_ms", 1, at_most=1.25),
        bounded("answers of a turn", "answers", 0, at_least=0.9),
        [*medians("requests refused of a turn", "refused", 0), "", "", ""],
        [*medians(f"draft tokens a round (2 callers: {few.drafted_share:.1f})", "drafted_per_round", 2), "", "", ""],
        ["a refusal, ms: median", "", f"{statistics.median(refusals):.1f}", "", "", ""],
        [
            *("a refusal, ms: 99 of 100", "", f"{quick:.1f}", "", f"at most {REFUSAL_BOUND_MS}"),
            "reached" if quick <= REFUSAL_BOUND_MS else "missed",
        ],
        ["Retry-After, s: median (most)", "", f"{statistics.median(waits):.0f} ({max(waits):.0f})", "", "", ""],
        [
            *(f"router's memory, bytes a refusal, over {sizes[-1][0]}", "", slope.text(0), "", "at most 256"),
            slope.verdict(at_most=256),
        ],
    ]
    facts = {
        "runs": runs.of,
        "refusal_ms": refusals,
        "retry_after_s": waits,
        "refusals_and_router_rss_bytes": sizes,
    }
    BENCH.publish(config, Table(HEADER, rows), facts, HEADER[3], argv=argv)


if __name__ == "__main__":
    sys.exit(main())
