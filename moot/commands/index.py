"""`moot index`: builds the suffix drafter's datastore from text files or from what a target has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moot.commands.common import DEMO_MODEL, command_of, say
from moot.config import load_config
from moot.core.errors import ConfigError
from moot.core.options import Options, option

if TYPE_CHECKING:
    from lab.training.dataset import TextStore, TrainingText


@dataclass(frozen=True, kw_only=True)
class IndexConfig(Options):
    out: Path = option(help="folder of the datastore, replaced if it is there: option datastore of the drafter suffix")
    files: tuple[Path, ...] = option((), help="text files, UTF-8, each one text")
    target: str = option(DEMO_MODEL, help="target model with whose tokenizer files are read")
    text: Path | None = option(None, help="folder of a training text (moot train --kind text): what the target wrote")
    positions: int | None = option(None, help="positions of the training text that are used; none: all")


def run(argv: Sequence[str]) -> int:
    config = load_config(
        IndexConfig,
        argv,
        prog="moot index",
        description="Build the datastore of the suffix drafter. Prompts are not in it, only what the target wrote.",
        example="moot index --text ~/.cache/moot/training/ID/ID --out datastore",
    )
    if not config.files and config.text is None:
        raise ConfigError("--files or --text is required")
    from moot.drafters.lookup.datastore import Datastore, build

    written = _read(config.text, config.positions) if config.text else None
    files, fingerprint = _from_files(config)
    texts = [*files, *(written[1].written() if written else ())]
    if written is not None:
        own = str(written[0].manifest["tokenizer"])
        if fingerprint not in ("", own):
            raise ConfigError(f"the text in {config.text} was written with another tokenizer than {config.target} has")
        fingerprint = own
    build(texts, config.out, fingerprint)
    say(f"{len(Datastore(config.out))} tokens of {len(texts)} texts")
    if written is not None:
        _describe(config, *written, len(texts))
    print(config.out)
    return 0


def _read(folder: Path, positions: int | None) -> tuple[TextStore, TrainingText]:
    from lab.training.dataset import TextStore, TrainingText

    store = TextStore(folder)
    return store, TrainingText.of(store, store.num_positions if positions is None else positions)


def _describe(config: IndexConfig, store: TextStore, text: TrainingText, num_texts: int) -> None:
    """The card, with the acceptance of the drafter kind on rows that are not in the datastore."""
    from lab.training.drafter_folder import describe, text_facts
    from lab.training.measure import measure_kind
    from moot.drafters.interface import MAX_VOCAB_SIZE
    from moot.drafters.lookup.datastore import Datastore
    from moot.drafters.registry import create

    facts = {
        "tokens": len(Datastore(config.out)),
        "texts": num_texts,
        "positions": text.num_positions,
        "text": text_facts(store),
    }
    found = measure_kind(create("suffix", {"vocab_size": MAX_VOCAB_SIZE, "datastore": config.out}), text)
    what = (
        "What the target wrote, sorted by what stands before, for the drafter kind `suffix` (option `datastore`: this"
        " folder). No prompt is in it."
    )
    command = command_of("index", config, ("text", "positions", "out"))
    describe(config.out, "Datastore", what, facts, found, command, store, say)


def _from_files(config: IndexConfig) -> tuple[list[Sequence[int]], str]:
    """The texts' ids and the tokenizer's fingerprint."""
    if not config.files:
        return [], ""
    from moot.shipped import cache_dir
    from moot.tokenizer import keep_torch_out, load_tokenizer, tokenizer_fingerprint

    if config.text is None:
        keep_torch_out()
    folder = cache_dir() / config.target
    tokenizer = load_tokenizer(folder if folder.is_dir() else config.target)
    texts: list[Sequence[int]] = []
    for path in config.files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        texts.append(tokenizer.encode(text, add_special_tokens=False))
    return texts, tokenizer_fingerprint(tokenizer)
