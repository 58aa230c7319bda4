"""A recording as a folder: `meta.json`, `texts.npz`, and `drafters/ID.npz` for each drafter that was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.replay.proposals import ProposalRecord, load_record
from lab.replay.recorded_texts import TargetText, load_texts
from moot.core.errors import ConfigError

TEXTS = "texts.npz"
DRAFTERS = "drafters"
_META = "meta.json"


@dataclass(frozen=True, slots=True)
class Meta:
    """What the texts are of. `settings`: what the recording was asked for; another recording goes into another folder.
    `origin`: how the texts were made."""

    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_limit: int
    origin: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """Texts in the order of their prompts, and records that cover all of them, by drafter id."""

    meta: Meta
    texts: Sequence[TargetText]
    records: Mapping[str, ProposalRecord]


def write_meta(folder: Path, meta: Meta) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _META).write_text(json.dumps(asdict(meta), indent=1) + "\n")


def read_meta(folder: Path) -> Meta | None:
    """None where nothing was recorded yet. Raises ConfigError for a file that is broken."""
    path = folder / _META
    if not path.exists():
        return None
    try:
        return Meta(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not of a recording: {error}") from error


def drafter_path(folder: Path, drafter_id: str) -> Path:
    return folder / DRAFTERS / f"{drafter_id}.npz"


def open_recording(folder: Path, drafter_ids: Sequence[str] = ()) -> Recording:
    """The texts, and the records of `drafter_ids` (none: of all). Raises ConfigError naming what is not there, and for
    a drafter whose recording was interrupted."""
    meta = read_meta(folder)
    if meta is None:
        raise ConfigError(f"nothing is recorded in {folder}: moot replay record")
    texts = load_texts(folder / TEXTS)
    there = sorted(path.stem for path in (folder / DRAFTERS).glob("*.npz"))
    if unknown := sorted(set(drafter_ids) - set(there)):
        raise ConfigError(f"no drafter {', '.join(unknown)} in {folder}; there is {', '.join(there) or 'none'}")
    records = {id_: load_record(drafter_path(folder, id_)) for id_ in drafter_ids or there}
    places = [text.num_places for text in texts]
    for id_, record in records.items():
        if [end - start for start, end in zip(record.text_starts, record.text_starts[1:], strict=False)] != places:
            raise ConfigError(f"drafter {id_} has not answered all texts of {folder}: record it again, or to the end")
    return Recording(meta, texts, records)
