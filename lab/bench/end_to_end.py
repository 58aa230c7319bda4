"""Tokens per second through HTTP with drafting on and off, one request at a time, interleaved.

    python -m bench.end_to_end [--prompts FILE [--held-out]] [--limit 20] [--repetitions 3] [--num-speculative-tokens K]

The whole system as processes on this machine, as in `moot demo`. FILE: JSON lines with `turns` (the first is asked) or
`prompt`; without it the demo's five prompts. Greedy, at most 128 tokens; decoding time after the first token.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.bench.driving.prompts import read_prompts
from lab.bench.report import publish
from moot.client import Client
from moot.commands.common import say
from moot.commands.demo import PROMPTS, Asker, DemoConfig, measure
from moot.commands.measure import COMPARISON_HEADER, DRAFTER_HEADER, Comparison
from moot.commands.system import running
from moot.config import load_config, option


@dataclass(frozen=True, kw_only=True)
class EndToEndConfig(DemoConfig):
    prompts: Path | None = option(None, help="JSON lines with `turns` or `prompt`; none: the demo's five")
    held_out: bool = option(False, help="of the file only questions whose id ends in 7")
    limit: int = option(20, help="prompts taken from the file, evenly spread over it")


def main() -> int:
    config = load_config(EndToEndConfig, sys.argv[1:], prog="python -m bench.end_to_end", description=__doc__ or "")
    prompts = read_prompts(config.prompts, config.limit, only_held_out=config.held_out) if config.prompts else PROMPTS
    with running(config, "bench", say) as system:
        asker = Asker(Client(system.url), config)
        warm_up = next(iter(prompts.values()))
        for drafting in (True, False):
            asker.ask(warm_up, drafting)
        samples = measure(asker, prompts, config.repetitions, system)
    comparison = Comparison.of(samples)
    rows = [comparison.only(name).row(name) for name in comparison.prompts] + [comparison.row("all")]
    facts = {
        "speed_up": comparison.speed_up,
        "acceptance_rate": comparison.acceptance_rate,
        "mean_acceptance_length": comparison.mean_acceptance_length,
        "identical": comparison.identical,
        "drafters": [dict(zip(DRAFTER_HEADER, row, strict=True)) for row in comparison.drafter_rows()],
        "samples": [asdict(sample) | {"text": None} for sample in samples],
    }
    publish("end_to_end", COMPARISON_HEADER, rows, facts)
    return 0 if comparison.identical else 1


if __name__ == "__main__":
    sys.exit(main())
