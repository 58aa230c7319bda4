"""Tokens per second through HTTP with drafting on and off, one request at a time, interleaved.

    python -m lab.bench.end_to_end [--prompts FILE [--held-out]] [--limit 20] [--repetitions 3] [-k K]

The whole system as processes on this machine, as in `moot demo`. FILE: JSON lines with `turns` (the first is asked) or
`prompt`; without it the demo's five prompts. Greedy, at most 128 tokens; decoding time after the first token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.prompts import PromptConfig, read_prompts
from moot.client import Client
from moot.commands.common import say
from moot.commands.demo import PROMPTS, Asker, DemoConfig, measure
from moot.commands.measure import COMPARISON_HEADER, DRAFTER_HEADER, Comparison
from moot.commands.system import running
from moot.config import option

BENCH = Bench("end_to_end", __doc__, measures=("services", "moot/core", "moot/drafters", "moot/model"))


@dataclass(frozen=True, kw_only=True)
class Config(PromptConfig, DemoConfig):
    repetitions: int = option(3, help="measured runs of each prompt, with and without drafting each")
    limit: int = option(20, help="prompts taken from the file, evenly spread over it")


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    prompts = read_prompts(config, config.limit) if config.prompts else PROMPTS
    with running(config, "bench", say) as system:
        asker = Asker(Client(system.url), config)
        warm_up = next(iter(prompts.values()))
        for drafting in (True, False):
            asker.ask(warm_up, drafting)
        samples = measure(asker, prompts, config.repetitions, system)
    comparison = Comparison.of(samples)
    # Of the prompts the page has three, without what their few runs range over; the JSON has every sample.
    by_gain = sorted(comparison.prompts, key=lambda name: comparison.only(name).speed_up)
    shown = {"least": by_gain[0], "median": by_gain[len(by_gain) // 2], "most": by_gain[-1]}
    whole = [*(comparison.only(name).row(f"{what}: {name}") for what, name in shown.items()), comparison.row("all")]
    rows = [[cell.partition(" (")[0] for cell in row] for row in whole]
    facts = {
        "speed_up": comparison.speed_up,
        "acceptance_rate": comparison.acceptance_rate,
        "mean_acceptance_length": comparison.mean_acceptance_length,
        "identical": comparison.identical,
        "drafters": [dict(zip(DRAFTER_HEADER, row, strict=True)) for row in comparison.drafter_rows()],
        "samples": [asdict(sample) | {"text": None} for sample in samples],
    }
    BENCH.publish(config, Table(COMPARISON_HEADER, rows), facts, "speed-up", argv=argv)
    return 0 if comparison.identical else 1


if __name__ == "__main__":
    sys.exit(main())
