"""Attached drafter kinds by name. A kind is loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moot.core.errors import ConfigError
from moot.drafters.attached.base import InsideDrafter
from moot.drafters.base import INSIDE_KINDS, DrafterEntry, parse_entries, parse_options
from moot.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class InsideKind:
    """`options`: closed, like those of every kind. `build(drafter_id, options, runner)`."""

    name: str
    options: type[Any]
    build: Callable[[str, Any, ModelRunner], InsideDrafter]


def load_inside_kind(kind: str) -> InsideKind:
    """Raises ConfigError naming the known kinds."""
    match kind:
        case "heads":
            from moot.drafters.attached.heads import HeadsDrafter, HeadsOptions

            return InsideKind("heads", HeadsOptions, HeadsDrafter)
        case "lookahead":
            from moot.drafters.attached.lookahead import LookaheadDrafter, LookaheadOptions

            return InsideKind("lookahead", LookaheadOptions, LookaheadDrafter)
        case "self":
            from moot.drafters.attached.self_layers import SelfDrafter, SelfOptions

            return InsideKind("self", SelfOptions, SelfDrafter)
    raise ConfigError(f"unknown drafter kind {kind} inside the verifier (known: {', '.join(INSIDE_KINDS)})")


def create_inside(entry: DrafterEntry, runner: ModelRunner) -> InsideDrafter:
    """A drafter over the target that `runner` drives. Raises ConfigError naming what is wrong: the kind, an option, a
    file, or a file that was made for another target."""
    spec = load_inside_kind(entry.kind)
    own: dict[str, object] = {"vocab_size": runner.info.vocab_size, "context_limit": runner.info.context_limit}
    return spec.build(entry.drafter_id, parse_options(spec.options, entry.kind, {**own, **entry.options}), runner)


def create_all_inside(entries: Sequence[str], flag: str, runner: ModelRunner) -> list[InsideDrafter]:
    """Of `[id=]kind[:option=value]...` entries. Raises ConfigError, as `create_inside` and `parse_entries` do."""
    return [create_inside(entry, runner) for entry in parse_entries(entries, flag)]
