"""Recording, resumable at every text: first what the target says, then what each drafter proposes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.replay.folder import TEXTS, drafter_path
from lab.replay.proposals import DrafterFacts, ProposalRecord, load_record, record_text, save_record
from lab.replay.recorded_texts import TargetText, load_texts, save_texts
from moot.core.errors import ConfigError
from moot.drafters.interface import DrafterEntry
from moot.drafters.registry import attached_kinds, create, load_kind
from moot.shipped import locate

if TYPE_CHECKING:
    from moot.model.runner import ModelRunner

SAVE_EVERY_S = 10.0
NUM_ROWS = 16
"""Texts made at a time."""
Say = Callable[[str], None]


class TextFile:
    """Texts as they come, kept in the order of their prompts' names."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._path = folder / TEXTS
        self._names = list(names)
        self._known = {text.name: text for text in load_texts(self._path)} if self._path.exists() else {}
        self._saved_at = time.monotonic()
        self._is_saved = True

    @property
    def missing(self) -> list[str]:
        return [name for name in self._names if name not in self._known]

    @property
    def texts(self) -> list[TargetText]:
        return [self._known[name] for name in self._names if name in self._known]

    def add(self, text: TargetText) -> None:
        self._known[text.name] = text
        self._is_saved = False
        if not self.missing:
            self.save()

    def save(self, every_s: float = 0.0) -> None:
        """Unless it was saved less than `every_s` ago, or nothing has come since."""
        if not self._is_saved and time.monotonic() - self._saved_at >= every_s:
            save_texts(self._path, self.texts)
            self._saved_at, self._is_saved = time.monotonic(), True


class Progress:
    """Says now and then how far it is, how fast, and how long it will take."""

    def __init__(self, say: Say, what: str, total: int, done: int = 0, unit: str = "texts") -> None:
        self._say, self._what, self._total, self._done, self._unit = say, what, total, done, unit
        self._begin = self._told = time.monotonic()
        self._new = 0

    def step(self, units: int = 1) -> None:
        self._done += units
        self._new += units
        now = time.monotonic()
        if now - self._told > SAVE_EVERY_S or self._done >= self._total:
            self._told = now
            rate = self._new / max(now - self._begin, 1e-9)
            left = (self._total - self._done) / max(rate, 1e-9)
            self._say(f"{self._what}: {self._done}/{self._total} {self._unit}, {rate:.1f}/s, {left:.0f} s left")


@dataclass(frozen=True, slots=True)
class Asking:
    """What every drafter is asked for at every place."""

    num_speculative_tokens: int
    width: int


def record_drafter(
    folder: Path,
    entry: DrafterEntry,
    texts: Sequence[TargetText],
    vocab_size: int,
    asking: Asking,
    say: Say,
    target: Callable[[], ModelRunner] | None = None,
) -> ProposalRecord:
    """Ask a drafter at every place of every text, from where an interrupted recording of the same drafter ended.

    `target`: gives the model that wrote the texts, for drafters that are attached to the verifier. Raises ConfigError
    where the folder holds another drafter of that name.
    """
    path = drafter_path(folder, entry.drafter_id)
    speaker = _speaker(entry, vocab_size, target)
    facts = DrafterFacts(
        entry.drafter_id,
        entry.kind,
        speaker.family,
        entry.options,
        asking.num_speculative_tokens,
        asking.width,
        num_bytes_of(entry),
    )
    record = load_record(path) if path.exists() else ProposalRecord(facts)
    if (before := record.facts) != facts:
        raise ConfigError(
            f"drafter {entry.drafter_id} was recorded as {before}: give this one another id, or remove it"
        )
    if record.num_texts == len(texts):
        say(f"{entry.drafter_id}: recorded already")
        return record
    first = record.num_texts
    if first and speaker.shares_sessions:
        # What it proposes depends on the texts before.
        record, first = ProposalRecord(facts), 0
    _record(speaker.record, texts[first:], record, path, Progress(say, entry.drafter_id, len(texts), first))
    return record


@dataclass(frozen=True, slots=True)
class _Speaker:
    """A drafter whose proposals are recorded."""

    family: str
    shares_sessions: bool
    record: Callable[[TargetText, ProposalRecord], None]


def _speaker(entry: DrafterEntry, vocab_size: int, target: Callable[[], ModelRunner] | None) -> _Speaker:
    if entry.kind not in attached_kinds():
        held = create(entry.kind, {"vocab_size": vocab_size, **entry.options})
        return _Speaker(held.family, held.shares_sessions, partial(record_text, held))
    if target is None:
        raise ConfigError(f"drafter {entry.drafter_id} is attached to the verifier: its target is needed")
    # Brings torch, which the other kinds need not.
    from lab.replay.attached_recorder import record_attached
    from moot.drafters.attached.kinds import create_attached

    runner = target()
    drafter = create_attached(entry, runner)
    if drafter.needs_rounds:
        raise ConfigError(f"drafter {entry.drafter_id}: what kind {entry.kind} proposes depends on the rounds before")
    return _Speaker(drafter.family, False, partial(record_attached, drafter, runner))


def _record(
    record_one: Callable[[TargetText, ProposalRecord], None],
    texts: Sequence[TargetText],
    record: ProposalRecord,
    path: Path,
    progress: Progress,
) -> None:
    saved_at = time.monotonic()
    for text in texts:
        record_one(text, record)
        progress.step()
        if time.monotonic() - saved_at > SAVE_EVERY_S:
            save_record(path, record)
            saved_at = time.monotonic()
    save_record(path, record)


def num_bytes_of(entry: DrafterEntry) -> int:
    """Of the files and folders that the options name: tables, datastores, models."""
    total = 0
    names = {"path"}
    if entry.kind not in attached_kinds():
        names = {field.name for field in fields(load_kind(entry.kind).options)}
    for name in ("datastore", "table", "model", "path"):
        if name in names and (value := entry.options.get(name)):
            path = locate(value)
            files = path.rglob("*") if path.is_dir() else [path]
            total += sum(file.stat().st_size for file in files if file.is_file())
    return total
