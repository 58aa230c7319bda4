"""`moot train`: makes training text with a target, and drafters from it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moot.commands.common import DEFAULT_SEED, DEMO_MODEL, command_of, say
from moot.config import load_config
from moot.core.errors import ConfigError
from moot.core.options import Options, option, option_of
from moot.model.compute import TorchOptions
from moot.shipped import cache_dir

if TYPE_CHECKING:
    from lab.training.dataset import TextStore

KINDS = ("text", "heads", "neural", "ngram")
DECIDING = ("kind", "target", "size", "passes", "positions", "seed", "prompts", "text", "out")
"""Flags that a drafter's card repeats."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    kind: str = option(
        help="what to make; text: only the training text, which the others make if need be", choices=KINDS
    )
    target: str = option(DEMO_MODEL, help="the model to draft for: the demo's, a folder or a hub id")
    out: Path | None = option(None, help="folder of the drafter (text: of the text, by default under MOOT_CACHE)")
    size: str = option("medium", help="size of the drafter", choices=("small", "medium", "large"))
    passes: float | None = option(None, help="passes over the text; none: the kind's own number", above=0)
    prompts: Path | None = option(
        None, help="JSON lines with turns or prompt, asked beside built-in ones; a question_id ending in 7 is refused"
    )
    positions: int = option(
        1_000_000, help="tokens of training text; on disk 1.2 GB a million for 576 hidden numbers", minimum=1
    )
    text: Path | None = option(None, help="folder of a training text to learn from as it is, instead of making one")
    minutes: float | None = option(None, help="stop after so many minutes; the same command goes on from there")
    seed: int = option(DEFAULT_SEED, help="seed of text and training")
    num_threads: int | None = option_of(TorchOptions, "num_threads")


def run(argv: Sequence[str]) -> int:
    config = load_config(
        TrainConfig,
        argv,
        prog="moot train",
        description="Make training text with a target, and drafters from it. Goes on where it was interrupted.",
        example="moot train --kind heads --positions 1000000 --out heads",
    )
    if config.kind != "text" and config.out is None:
        raise ConfigError("--out is required for a drafter")
    # Imports torch: not before the flags are known to be right.
    from lab.training.dataset import TextStore
    from moot.model.loading.prepare import SMOLLM2, prepare

    until = float("inf") if config.minutes is None else time.monotonic() + 60 * config.minutes
    folder = prepare(config.target, None, say) if config.target == SMOLLM2 else Path(config.target)
    store = TextStore(config.text) if config.text else _text(config, folder, until)
    if store is not None and config.kind == "text":
        print(store.folder)
    elif store is not None and config.out is not None:
        _drafter(config, config.out, folder, store, until, command_of("train", config, DECIDING))
    return 0


def _text(config: TrainConfig, folder: Path, until: float) -> TextStore | None:
    """The training text, None where the time was over before it was complete."""
    from lab.training.dataset import TextStore
    from lab.training.prompts import read_prompts
    from lab.training.teacher import product_dtype
    from lab.training.text_making import TextMaker, TextSettings, make_text
    from moot.model.loading.load import choose_device, load_model

    prompts, refused = read_prompts(config.prompts) if config.prompts else ([], 0)
    if refused:
        say(f"{refused} prompts are held out for measuring and not used")
    # On a CPU the automatic choice is measured, and a busy moment would begin another text.
    dtype = "auto" if choose_device("auto").type == "cuda" else str(product_dtype()).removeprefix("torch.")
    loaded = load_model(folder, dtype=dtype, num_threads=config.num_threads)
    maker = TextMaker(loaded, TextSettings(seed=config.seed), prompts)
    own = config.out if config.kind == "text" else None
    store = TextStore.create(own or maker.folder(cache_dir()), maker.manifest)
    say(f"training text in {store.folder}: {store.num_positions} positions are there, {config.positions} wanted")
    if make_text(maker, store, config.positions, until):
        return store
    say(f"training text has {store.num_positions} positions so far; the same command goes on")
    return None


def _drafter(config: TrainConfig, out: Path, folder: Path, store: TextStore, until: float, command: str) -> None:
    import torch

    from lab.training.dataset import TrainingText
    from lab.training.drafter_folder import make_drafter, trainer
    from lab.training.teacher import load_teacher

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    text = TrainingText.of(store, config.positions)
    made = trainer(config.kind, config.size, config.seed, config.passes, load_teacher(folder, store), text)
    say(f"{config.kind} from {text.num_positions} positions: {json.dumps(made.facts)}")
    if make_drafter(made, store, out, command, until, say):
        print(out)
    else:
        say("the time is over; the same command goes on")
