"""`moot demo`: the whole system on this machine, asked the same with drafting on and off, and compared.

The five prompts are everyday tasks, chosen before anything was measured with them, and never changed since. Greedy
(temperature 0), at most 128 tokens an answer, ended by the model's end token. After a warm-up the runs with and without
drafting alternate, three times; in every other repetition the one without goes first.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moot.client import AnswerOptions, Client, RequestFailed, StreamedAnswer
from moot.commands.common import say, table
from moot.commands.measure import COMPARISON_HEADER, DRAFTER_HEADER, Comparison, Sample
from moot.commands.system import System, SystemConfig, drafters_of, running
from moot.config import load_config
from moot.core.options import option, option_of

PROMPTS = {
    "writing": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "question": "Why does the moon look larger near the horizon than when it is high in the sky?",
    "translation": (
        "Translate into French: The library opens at nine in the morning and closes at six in the evening. On Sundays "
        "it is closed. Please bring your card, and return your books before the end of the month."
    ),
    "summary": (
        "Summarize the following text in a few sentences.\n\n"
        "The town of Brenn lies where two rivers meet. For three centuries its mills ground the grain of the whole "
        "valley, and barges carried the flour to the coast. When the railway came, the barges disappeared within ten "
        "years, and most of the mills closed. One of them was bought by a family of clockmakers, who used the water "
        "wheel to drive their lathes. Their clocks became known for keeping time in damp houses, and by the turn of "
        "the century every second house in the valley owned one. Today the mill is a museum. The wheel still turns "
        "on Saturdays, and visitors can watch a clockmaker repair the old pieces that people bring from their attics."
    ),
    "arithmetic": (
        "A baker makes 24 rolls in each batch and bakes 7 batches. She sells 95 rolls in the morning and 48 in the "
        "afternoon. How many rolls are left? Explain step by step."
    ),
}


@dataclass(frozen=True, kw_only=True)
class DemoConfig(SystemConfig):
    port: int = option_of(SystemConfig, "port", default=0)
    prompt: str | None = option(None, help="ask this instead of the five prompts")
    max_tokens: int = option_of(AnswerOptions, "max_tokens")
    repetitions: int = option(3, help="measured runs of each prompt, with and without drafting each")
    num_speculative_tokens: int | None = option(None, help="K of every round with drafting; none: the policy decides")
    json_file: Path | None = option(None, help="also write every sample here")


def run(argv: Sequence[str]) -> int:
    config = load_config(
        DemoConfig,
        argv,
        prog="moot demo",
        description="Ask the same with drafting on and off. Exit status 0 only if the texts are identical.",
        example='moot demo --prompt "Why is the sky blue?"',
    )
    prompts = {"yours": config.prompt} if config.prompt else PROMPTS
    with running(config, "demo", say) as system:
        asker = Asker(system.client, config)
        _show(asker, next(iter(prompts.values())))
        samples = measure(asker, prompts, config.repetitions, system)
    comparison = Comparison.of(samples)
    if config.json_file is not None:
        config.json_file.write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n")
    print(report(comparison, asker.model, config))
    return 0 if comparison.identical else 1


class Asker:
    def __init__(self, client: Client, config: DemoConfig) -> None:
        self._client = client
        self._config = config
        self.model = client.models()[0]

    def ask(self, prompt: str, drafting: bool, show: bool = False) -> StreamedAnswer:
        """Raises RequestFailed."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
            "include_metrics": True,
            "return_token_ids": True,
        }
        asked = self._config.num_speculative_tokens if drafting else 0
        if asked is not None:
            body["num_speculative_tokens"] = asked
        answer = StreamedAnswer()
        for piece in self._client.stream_chat(body, answer):
            if show:
                print(piece.text, end="", flush=True)
        if not answer.token_ids:
            raise RequestFailed("the server sent no token ids, so that texts could not be compared")
        return answer


def measure(asker: Asker, prompts: Mapping[str, str], repetitions: int, system: System) -> list[Sample]:
    samples: list[Sample] = []
    for repetition in range(repetitions):
        order = (True, False) if repetition % 2 == 0 else (False, True)
        for name, prompt in prompts.items():
            for drafting in order:
                system.supervisor.check()
                sample = Sample.of(name, drafting, asker.ask(prompt, drafting))
                samples.append(sample)
                mode = "on " if drafting else "off"
                say(f"{repetition + 1}/{repetitions} {name:<12} drafting {mode} {sample.tokens_per_s:6.1f} tokens/s")
    return samples


def report(comparison: Comparison, model: str, config: DemoConfig) -> str:
    rows = [comparison.only(name).row(name) for name in comparison.prompts]
    if len(rows) > 1:
        rows.append(comparison.row("all"))
    lines = [
        "",
        f"{model}, greedy, at most {config.max_tokens} tokens; decoding after the first token, "
        f"median (lowest-highest) of {config.repetitions}",
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}; "
        f"drafters: {', '.join(drafters_of(config).drafter_ids)}",
        "",
        table(COMPARISON_HEADER, rows),
        "",
        table(DRAFTER_HEADER, comparison.drafter_rows()),
        "",
        f"speed-up {comparison.speed_up:.2f}, acceptance rate {comparison.acceptance_rate:.0%}, "
        f"mean acceptance length {comparison.mean_acceptance_length:.2f}",
    ]
    if comparison.identical:
        lines.append("texts identical: yes, token by token, with and without drafting")
    else:
        places = {name: comparison.first_difference(name) for name in comparison.prompts}
        parted = [f"{name} at token {place}" for name, place in places.items() if place is not None]
        lines.append(f"texts identical: NO, the answers part: {', '.join(parted)}")
    return "\n".join(lines)


def _show(asker: Asker, prompt: str) -> None:
    """The warm-up, with drafting and without; the first answer is shown while it comes."""
    print(f"\n{prompt}\n", flush=True)
    asker.ask(prompt, drafting=True, show=True)
    print("\n", flush=True)
    say("warming up without drafting")
    asker.ask(prompt, drafting=False)
    sys.stdout.flush()
