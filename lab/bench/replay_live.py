"""Whether a replay tells the truth: the same prompts through a running system, one after the other, and its acceptance.

    python -m bench.replay_live --recording DIR --prompts FILE [--limit 48] [--drafters suffix,prompt_lookup,recycling]

DIR: of `moot replay record` from FILE, with drafters of the same names. The whole system runs as processes on this
machine, as in `moot demo`; K is fixed, and rounds wait for every drafter, so that timing plays no part.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.report import publish
from lab.replay.evaluate import Policies, Replay
from lab.replay.folder import Recording, open_recording
from lab.replay.prompts import read_prompts
from lab.replay.rounds import Played
from moot.client import Answer, Client
from moot.commands.common import say
from moot.commands.system import SystemConfig, running
from moot.config import load_config, option

PATIENT = {"MOOT_VOTE_SOFT_DEADLINE_MS": "5000", "MOOT_VOTE_HARD_DEADLINE_MS": "5000", "MOOT_DRAFTER_WARM_UP_S": "30"}
DRAFT_TOKENS = 16
HEADER = ("", "rounds", "drafted", "accepted", "acceptance length")


@dataclass(frozen=True, kw_only=True)
class LiveConfig(SystemConfig):
    recording: Path = option(help="folder of a recording of the same target")
    prompts: Path = option(help="the file that its prompts were taken from")
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    limit: int = option(48, help="texts asked, from the first")
    num_speculative_tokens: int = option(8, help="K of every round")


@dataclass(frozen=True, slots=True)
class Counted:
    """Of one text. `is_same`: its ids are those of the recording."""

    rounds: int
    drafted: int
    accepted: int
    is_same: bool = True


def replayed(one: Played) -> Counted:
    generation = one.generation
    return Counted(generation.num_rounds, generation.num_draft_tokens, generation.num_accepted_tokens)


def ask(client: Client, model: str, recording: Recording, index: int, question: str, length: int) -> Counted:
    text = recording.texts[index]
    seed = int(recording.meta.settings["seed"]) + index
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": text.temperature,
        "max_tokens": text.max_tokens,
        "seed": seed,
        "num_speculative_tokens": length,
        "return_token_ids": True,
        "include_metrics": True,
    }
    answer = Answer()
    for _ in client.stream_chat(body, answer):
        pass
    counts = answer.metrics["speculative_decoding"]
    return Counted(
        counts["num_drafts"],
        counts["num_draft_tokens"],
        counts["num_accepted_tokens"],
        tuple(answer.token_ids) == text.output_token_ids,
    )


def row(name: str, counted: list[Counted]) -> tuple[float, list[str]]:
    rounds = sum(one.rounds for one in counted)
    drafted = sum(one.drafted for one in counted)
    accepted = sum(one.accepted for one in counted)
    length = 1 + accepted / max(rounds, 1)
    return length, [name, str(rounds), str(drafted), str(accepted), f"{length:.4f}"]


def main() -> int:
    config = load_config(LiveConfig, sys.argv[1:], prog="python -m bench.replay_live", description=__doc__ or "")
    names = tuple(entry.partition(":")[2] or entry for entry in config.drafters)
    recording = open_recording(config.recording, names)
    questions = {prompt.name: prompt.text for prompt in read_prompts(config.prompts)}
    policies = Policies(
        vote="calibrated",
        shape="tree",
        weights="hedge",
        num_speculative_tokens=config.num_speculative_tokens,
        max_draft_tokens=DRAFT_TOKENS,
    )
    known = [replayed(one) for one in Replay(recording).run(policies)][: config.limit]
    os.environ.update(PATIENT)
    live: list[Counted] = []
    with running(config, "replay-live", say) as system:
        model = system.client.models()[0]
        for index, text in enumerate(recording.texts[: config.limit]):
            system.supervisor.check()
            question = questions[text.name]
            live.append(ask(system.client, model, recording, index, question, config.num_speculative_tokens))
            say(f"{index + 1}/{len(known)} {text.name}: rounds {live[-1].rounds}, replayed {known[index].rounds}")
    (there, live_row), (here, replayed_row) = row("live", live), row("replayed", known)
    ratio = there / here
    num_same = sum(one.is_same for one in live)
    facts = {
        "live": there,
        "replayed": here,
        "ratio": ratio,
        "texts": len(live),
        "texts_identical": num_same,
        "texts_with_equal_rounds": sum(a.rounds == b.rounds for a, b in zip(live, known, strict=True)),
    }
    publish("replay_live", HEADER, [live_row, replayed_row, ["ratio", "", "", "", f"{ratio:.4f}"]], facts)
    print(f"{num_same} of {len(live)} texts are those of the recording, id by id")
    return 0 if num_same == len(live) and abs(ratio - 1) < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
