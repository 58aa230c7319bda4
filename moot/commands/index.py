"""`moot index`: builds the suffix drafter's datastore from text files or from what a target has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moot.commands.common import say
from moot.config import load_config, option
from moot.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    out: Path = option(help="folder of the datastore, replaced if it is there: option datastore of the drafter suffix")
    files: tuple[Path, ...] = option((), help="text files, UTF-8, each one text")
    target: str = option("smollm2-135m-instruct", help="whose tokenizer files are read with")
    text: Path | None = option(None, help="folder of a training text (moot train --kind text): what the target wrote")
    positions: int | None = option(None, help="of the training text only so many positions; none: all")


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
    from moot.proposers.datastore import Datastore, build

    files, fingerprint = _from_files(config)
    written, written_fingerprint = _from_text(config)
    if fingerprint and written_fingerprint not in ("", fingerprint):
        raise ConfigError(f"the text in {config.text} was written with another tokenizer than {config.target} has")
    texts = [*files, *written]
    build(texts, config.out, fingerprint or written_fingerprint)
    say(f"{len(Datastore(config.out))} tokens of {len(texts)} texts")
    print(config.out)
    return 0


def _from_files(config: IndexConfig) -> tuple[list[Sequence[int]], str]:
    """The texts' ids and the tokenizer's fingerprint."""
    if not config.files:
        return [], ""
    from moot.commands.common import cache_folder
    from moot.tokenizer import keep_torch_out, load_tokenizer, tokenizer_fingerprint

    if config.text is None:
        keep_torch_out()
    folder = cache_folder() / config.target
    tokenizer = load_tokenizer(folder if folder.is_dir() else config.target)
    texts: list[Sequence[int]] = []
    for path in config.files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        texts.append(tokenizer.encode(text, add_special_tokens=False))
    return texts, tokenizer_fingerprint(tokenizer)


def _from_text(config: IndexConfig) -> tuple[list[Sequence[int]], str]:
    if config.text is None:
        return [], ""
    from moot.training.dataset import Text
    from moot.training.store import TextStore

    store = TextStore(config.text)
    text = Text.of(store, store.num_positions if config.positions is None else config.positions)
    return list(text.written()), str(store.manifest["tokenizer"])
