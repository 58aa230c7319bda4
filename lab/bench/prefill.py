"""What a long prompt does to others, and what its second reading costs: the whole system, over HTTP.

    python -m bench.prefill [--prompt-tokens 4000] [--streams 4] [--repetitions 7] [--chunk-tokens 256]

Part 1: while `streams` answers run (drafting off, so that each piece is one step), a prompt of fresh tokens arrives.
The longest gap between two pieces of a running stream until the prompt's first token is compared with one chunk plus
the usual gap. A chunk's time is that of the prompt's later half, which is the slower one, read alone: first token of
the whole prompt less that of its first half. A request left out of two steps in a row would show a ratio near 2.
Part 2: time to first token of a request whose prefix nobody has asked before, then of one with the same prefix and
another end; fresh prefixes for each pair.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from lab.bench.driving.streams import Reply, RequestBroken, ask
from lab.bench.driving.watched import metrics_of
from lab.bench.intervals import Interval, ratios
from lab.bench.report import publish
from moot.commands.common import say
from moot.commands.system import System, SystemConfig, running
from moot.config import load_config, option

TAIL_TOKENS = 16
SETTLED_PIECES = 12
HEADER = ("what", "value (95 %)", "bound", "verdict")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(SystemConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    prompt_tokens: int = option(4000, help="length of the long prompt")
    streams: int = option(4, help="answers that run when it arrives")
    repetitions: int = option(7, help="pairs of each sort")
    chunk_tokens: int = option(256, help="the verifier's --prefill-chunk-tokens")
    vocab_size: int = option(40_000, help="ids of prompts are drawn below this")


class Asker:
    def __init__(self, system: System, config: PrefillConfig) -> None:
        self._system = system
        self._config = config
        self._model = system.client.models()[0]
        self._draw = random.Random(1)

    def ids(self, count: int) -> list[int]:
        """Fresh ones: no two prompts share a block."""
        return [self._draw.randrange(100, self._config.vocab_size) for _ in range(count)]

    async def ask(self, prompt: list[int], max_tokens: int, reply: Reply | None = None) -> Reply:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        found = await ask(
            self._system.url, body | {"num_speculative_tokens": 0}, name="prefill", chat=False, into=reply
        )
        if not found.is_whole or found.error:
            raise RequestBroken(f"HTTP {found.status} {found.error or 'broke off'}")
        return found

    def first_token_s(self, prompt: list[int]) -> float:
        return asyncio.run(self.ask(prompt, 1)).first_token_s


@dataclass(frozen=True, slots=True)
class Arrival:
    """One long prompt among running streams. Seconds; `pieces`: of each stream, relative to the prompt's sending."""

    usual_gap_s: float
    longest_gap_s: float
    reading_s: float
    steps: float
    pieces_per_step: float
    pieces: list[list[float]]


async def arrival(asker: Asker, config: PrefillConfig, verifier: int) -> Arrival:
    streams = [Reply("running") for _ in range(config.streams)]
    tasks = [asyncio.create_task(asker.ask(asker.ids(40), 400, reply)) for reply in streams]
    try:
        while min(len(reply.pieces) for reply in streams) < SETTLED_PIECES:
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
                    raise RequestBroken("a stream ended before the long prompt came")
        before = await asyncio.to_thread(metrics_of, verifier)
        long = await asker.ask(asker.ids(config.prompt_tokens), 1)
        after = await asyncio.to_thread(metrics_of, verifier)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    begin, end = long.sent, long.pieces[0][0]
    times = [[at for at, _ in reply.pieces] for reply in streams]
    settled = [gap for reply in streams for gap in reply.gaps[2 : SETTLED_PIECES - 1]]
    inside = [
        later - earlier
        for one in times
        for earlier, later in itertools.pairwise(one)
        if later > begin and earlier < end
    ]
    key = ("moot_forward_seconds_count", "")
    steps = after[key] - before[key]
    mean_pieces = statistics.fmean(sum(begin < at <= end for at in one) for one in times)
    relative = [[at - begin for at in one] for one in times]
    return Arrival(statistics.median(settled), max(inside), end - begin, steps, mean_pieces / steps, relative)


def main() -> int:
    config = load_config(PrefillConfig, sys.argv[1:], prog="python -m bench.prefill", description=__doc__ or "")
    arrivals: list[Arrival] = []
    chunks: list[float] = []
    firsts: list[float] = []
    seconds: list[float] = []
    with running(config, "prefill", say) as system:
        asker = Asker(system, config)
        verifier = int(system.verifier.facts["metrics_port"])
        asker.first_token_s(asker.ids(config.prompt_tokens))
        for index in range(config.repetitions):
            system.supervisor.check()
            half = config.prompt_tokens // 2
            whole_s = asker.first_token_s(shared := asker.ids(config.prompt_tokens))
            firsts.append(whole_s)
            seconds.append(asker.first_token_s([*shared[:-TAIL_TOKENS], *asker.ids(TAIL_TOKENS)]))
            half_s = asker.first_token_s(asker.ids(half))
            chunks.append((whole_s - half_s) * config.chunk_tokens / (config.prompt_tokens - half))
            arrivals.append(one := asyncio.run(arrival(asker, config, verifier)))
            say(
                f"{index + 1}/{config.repetitions} longest gap {1e3 * one.longest_gap_s:.0f} ms, a chunk"
                f" {1e3 * chunks[-1]:.0f} ms, usual gap {1e3 * one.usual_gap_s:.0f} ms,"
                f" {one.pieces_per_step:.2f} pieces a step; first token {firsts[-1]:.2f} s, again {seconds[-1]:.2f} s"
            )
    report(config, arrivals, chunks, firsts, seconds)
    return 0


def report(
    config: PrefillConfig, arrivals: list[Arrival], chunks: list[float], firsts: list[float], seconds: list[float]
) -> None:
    longest = [one.longest_gap_s for one in arrivals]
    allowed = [chunk + one.usual_gap_s for chunk, one in zip(chunks, arrivals, strict=True)]
    stop, again = ratios(longest, allowed), ratios(seconds, firsts)
    rows = [
        ("usual gap of a running stream, ms", Interval.of([1e3 * one.usual_gap_s for one in arrivals]).text(0), "", ""),
        ("a chunk of the prompt's later half, ms", Interval.of([1e3 * chunk for chunk in chunks]).text(0), "", ""),
        ("longest gap while it is read, ms", Interval.of([1e3 * gap for gap in longest]).text(0), "", ""),
        ("longest gap of one chunk + usual gap", stop.text(), "at most 1.25", stop.verdict(at_most=1.25)),
        ("pieces of each stream per step", Interval.of([one.pieces_per_step for one in arrivals]).text(), "", ""),
        ("first token, new prefix, s", Interval.of(firsts).text(), "", ""),
        ("first token, same prefix again, s", Interval.of(seconds).text(3), "", ""),
        ("again of new", again.text(3), "at most 0.3", again.verdict(at_most=0.3)),
    ]
    facts = {
        "prompt_tokens": config.prompt_tokens,
        "streams": config.streams,
        "chunk_s": chunks,
        "first_token_s": {"new": firsts, "again": seconds},
        "arrivals": [{name: getattr(one, name) for name in Arrival.__slots__} for one in arrivals],
    }

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        last = arrivals[-1]
        for number, times in enumerate(last.pieces):
            gaps = [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
            left.plot(times[1:], gaps, ".", label=f"stream {number}")
        left.axvspan(0, last.reading_s, alpha=0.15, label="the prompt is read")
        left.axhline(1e3 * allowed[-1], color="grey", linewidth=0.8, label="one chunk + usual gap")
        left.set(xlabel="seconds after the prompt was sent", ylabel="gap before a piece, ms", ylim=(0, None))
        left.legend(fontsize="small")
        right.plot(firsts, "o-", label="new prefix")
        right.plot(seconds, "o-", label="same prefix again")
        right.set(xlabel="pair", ylabel="first token, s", ylim=(0, None))
        right.legend(fontsize="small")

    publish("prefill", HEADER, rows, facts, draw)


if __name__ == "__main__":
    sys.exit(main())
