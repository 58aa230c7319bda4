"""What callers who are refused cost those who are served: the whole system at capacity and at four times that.

    python -m bench.overload [--pairs 4] [--seconds 2.5] [--seqs 8] [--step-ms 20]

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.bench.driving.streams import Reply, RequestBroken, ask
from lab.bench.driving.watched import gained, memory_of, scrape
from lab.bench.intervals import ratios
from lab.bench.memory import theil_sen
from lab.bench.report import publish
from moot.commands.common import say
from moot.commands.system import System, SystemConfig, running
from moot.config import load_config, option, variable_of

HEADER = ("what", "at capacity", "at 4 times capacity", "ratio (95 %)", "bound", "verdict")
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
LETTERS = list(b"abcdefgh")
TIMES = 4
IMPATIENT = 12
"""Callers who ask again at once when they are refused, at the end."""
REFUSAL_BOUND_MS = 50


@dataclass(frozen=True, kw_only=True)
class OverloadConfig(SystemConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    drafters: tuple[str, ...] = option(("suffix", "prompt_lookup"), help="[id=]kind[:option=value]... each")
    num_threads: int = option(1, help="the verifier's compute threads; 0: one per core")
    pairs: int = option(4, help="turns at capacity, and as many at four times that")
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
    def first_token_s(self) -> float:
        return statistics.median(reply.first_token_s for reply in self.served)

    @property
    def token_gap_s(self) -> float:
        return statistics.fmean(gap for reply in self.served for gap in reply.token_gaps)


class Callers:
    def __init__(self, system: System, config: OverloadConfig) -> None:
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


def main() -> int:
    config = load_config(OverloadConfig, sys.argv[1:], prog="python -m bench.overload", description=__doc__ or "")
    os.environ |= {
        "MOOT_FAULTS": f"verifier.step=delay:{config.step_ms / 1000:g}",
        variable_of("max_num_seqs"): str(config.seqs),
        variable_of("max_waiting_seqs"): str(config.seqs),
    }
    pairs: list[tuple[Turn, Turn]] = []
    with tempfile.TemporaryDirectory(prefix="moot-") as folder:
        if not config.demo:
            from moot.testing.tiny_model import make_tiny_model

            config = replace(config, model=str(make_tiny_model(Path(folder) / "tiny")))
        with running(config, "overload", say) as system:
            callers = Callers(system, config)
            few = asyncio.run(callers.turn(2))
            say(f"{few.drafted_share:.1f} draft tokens a round with 2 callers")
            for index in range(config.pairs):
                system.supervisor.check()
                at_capacity = asyncio.run(callers.turn(2 * config.seqs))
                above = asyncio.run(callers.turn(TIMES * 2 * config.seqs))
                pairs.append((at_capacity, above))
                say(
                    f"{index + 1}/{config.pairs} first token {at_capacity.first_token_s:.2f} and"
                    f" {above.first_token_s:.2f} s, between tokens {1e3 * at_capacity.token_gap_s:.1f} and"
                    f" {1e3 * above.token_gap_s:.1f} ms, {len(above.refusals)} refused"
                )
            sizes = asyncio.run(callers.refuse(config.refusals))
    report(few, pairs, sizes)
    return 0


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(few: Turn, pairs: list[tuple[Turn, Turn]], sizes: list[tuple[int, int]]) -> None:
    firsts = [(1e3 * one.first_token_s, 1e3 * other.first_token_s) for one, other in pairs]
    gaps = [(1e3 * one.token_gap_s, 1e3 * other.token_gap_s) for one, other in pairs]
    served = [(len(one.served), len(other.served)) for one, other in pairs]
    refusals = [1e3 * took for _, above in pairs for took in above.refusals]
    waits = [wait for _, above in pairs for wait in above.waits]
    first, gap, answers = (
        ratios([above for _, above in found], [at for at, _ in found]) for found in (firsts, gaps, served)
    )
    slope = theil_sen([count for count, _ in sizes], [size for _, size in sizes])

    def medians(found: Sequence[tuple[float, float]], digits: int) -> list[str]:
        return [f"{statistics.median(column):.{digits}f}" for column in zip(*found, strict=True)]

    quick = quantile(refusals, 0.99)
    drafted = [(one.drafted_share, other.drafted_share) for one, other in pairs]
    rows = [
        ("first token, ms", *medians(firsts, 0), first.text(), "at most 1.25", first.verdict(at_most=1.25)),
        ("between tokens, ms", *medians(gaps, 1), gap.text(), "at most 1.25", gap.verdict(at_most=1.25)),
        (
            "answers of a turn",
            *medians(served, 0),
            answers.text(),
            "at least 0.9",
            answers.verdict(at_least=0.9),
        ),
        ("requests refused of a turn", *medians([(len(a.refusals), len(b.refusals)) for a, b in pairs], 0), "", "", ""),
        (f"draft tokens a round (2 callers: {few.drafted_share:.1f})", *medians(drafted, 2), "", "", ""),
        ("a refusal, ms: median", "", f"{statistics.median(refusals):.1f}", "", "", ""),
        (
            "a refusal, ms: 99 of 100",
            "",
            f"{quick:.1f}",
            "",
            f"at most {REFUSAL_BOUND_MS}",
            "reached" if quick <= REFUSAL_BOUND_MS else "missed",
        ),
        ("Retry-After, s: median (most)", "", f"{statistics.median(waits):.0f} ({max(waits):.0f})", "", "", ""),
        (
            f"router's memory, bytes a refusal, over {sizes[-1][0]}",
            "",
            slope.text(0),
            "",
            "at most 256",
            slope.verdict(at_most=256),
        ),
    ]
    facts = {
        "first_token_ms": firsts,
        "token_gap_ms": gaps,
        "answers": served,
        "refusal_ms": refusals,
        "retry_after_s": waits,
        "refusals_and_router_rss_bytes": sizes,
    }

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.plot([at for at, _ in firsts], "o-", label="first token, at capacity")
        left.plot([above for _, above in firsts], "o-", label=f"first token, {TIMES} times that")
        left.set(xlabel="pair", ylabel="ms", ylim=(0, None))
        left.legend(fontsize="small")
        right.hist(refusals, bins=40)
        right.axvline(REFUSAL_BOUND_MS, color="grey", linewidth=0.8)
        right.set(xlabel="ms until a refusal", ylabel="refusals")

    publish("overload", HEADER, rows, facts, draw)


if __name__ == "__main__":
    sys.exit(main())
