"""Attached drafter kinds by name. A kind is loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moot.core.errors import ConfigError
from moot.drafters.attached.attached_interface import AttachedDrafter
from moot.drafters.interface import DrafterEntry, parse_entries, parse_options
from moot.drafters.registry import ATTACHED_GROUP, attached_kinds, installed
from moot.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class AttachedKind:
    """An attached kind as the registry knows it. `options`: closed, like those of every kind. `build(drafter_id,
    options, runner)`."""

    name: str
    options: type[Any]
    build: Callable[[str, Any, ModelRunner], AttachedDrafter]


def load_attached_kind(kind: str) -> AttachedKind:
    """The kind of this name, loaded. Raises ConfigError naming the known kinds."""
    if kind == "heads":
        from moot.drafters.attached.heads import HeadsDrafter, HeadsOptions

        return AttachedKind("heads", HeadsOptions, HeadsDrafter)
    if (found := installed(kind, ATTACHED_GROUP, AttachedKind)) is not None:
        return found
    raise ConfigError(f"unknown drafter kind {kind} inside the verifier (known: {', '.join(attached_kinds())})")


def create_attached(entry: DrafterEntry, runner: ModelRunner) -> AttachedDrafter:
    """A drafter over the target that `runner` drives. Raises ConfigError naming what is wrong: the kind, an option, a
    file, or a file that was made for another target."""
    spec = load_attached_kind(entry.kind)
    own: dict[str, object] = {"vocab_size": runner.info.vocab_size, "context_limit": runner.info.context_limit}
    return spec.build(entry.drafter_id, parse_options(spec.options, entry.kind, {**own, **entry.options}), runner)


def create_all_attached(entries: Sequence[str], flag: str, runner: ModelRunner) -> list[AttachedDrafter]:
    """The attached drafters of `[id=]kind[:option=value]...` entries. Raises ConfigError, as `create_attached` and
    `parse_entries` do."""
    return [create_attached(entry, runner) for entry in parse_entries(entries, flag)]
