"""`moot train`: makes training text with a target, and drafters from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moot.commands.common import cache_folder, say
from moot.config import load_config, option
from moot.core.errors import ConfigError

BYTES_PER_NUMBER = 2


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    target: str = option(
        "smollm2-135m-instruct", help="the model that drafters are for: the demo's, a folder or hub id"
    )
    kind: str = option(help="text: only make the training text, which the others share", choices=("text",))
    out: Path | None = option(None, help="folder of the drafter (text: where it lies, by default under MOOT_CACHE)")
    prompts: Path | None = option(
        None, help="JSON lines with prompt or turns; held-out lines (question_id ending in 7) are refused"
    )
    positions: int = option(
        1_000_000, help="tokens of training text; with 576 hidden numbers 1.2 KB each (1.2 GB a million)"
    )
    minutes: float | None = option(None, help="stop after so many minutes; the same command goes on from there")
    seed: int = option(0, help="of text and training")
    num_threads: int | None = option(None, help="torch threads; none: torch's default")


def run(argv: Sequence[str]) -> int:
    config = load_config(
        TrainConfig,
        argv,
        prog="moot train",
        description="Make training text with a target, and drafters from it. Goes on where it was interrupted.",
        example="moot train --kind text --positions 1000000",
    )
    if config.positions < 1:
        raise ConfigError("--positions must be positive")
    # Imports torch: not before the flags are known to be right.
    from moot.model.load import load_model
    from moot.model.prepare import SMOLLM2, prepare
    from moot.training.prompt_file import read_prompts
    from moot.training.store import TextStore
    from moot.training.text import TextMaker, TextSettings, make_text

    until = float("inf") if config.minutes is None else time.monotonic() + 60 * config.minutes
    folder = prepare(config.target, None, say) if config.target == SMOLLM2 else config.target
    prompts, refused = read_prompts(config.prompts) if config.prompts else ([], 0)
    if refused:
        say(f"{refused} prompts are held out for measuring and not used")
    loaded = load_model(folder, num_threads=config.num_threads)
    maker = TextMaker(loaded, TextSettings(seed=config.seed), prompts)
    store = TextStore.create(config.out or maker.folder(cache_folder()), maker.manifest)
    say(f"text in {store.folder}: {store.num_positions} positions are there, {config.positions} wanted")
    complete = make_text(maker, store, config.positions, until)
    say(f"text has {store.num_positions} positions" + ("" if complete else "; the same command goes on"))
    print(store.folder)
    return 0
