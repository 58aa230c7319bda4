"""Options of drafter kinds: one frozen dataclass per kind, closed, built from any mapping (text or typed values)."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from moot.config import option, parse_value
from moot.core.errors import ConfigError

OptionsT = TypeVar("OptionsT", bound="ProposerOptions")

MAX_VOCAB_SIZE = 1 << 21
"""Ids fit in 21 bits, so that three of them pack exactly into one 64-bit key."""


@dataclass(frozen=True, kw_only=True)
class ProposerOptions:
    """What every kind understands."""

    vocab_size: int = option(help="size of the tokenizer's vocabulary; ids at or above it are never proposed")
    context_limit: int = option(131_072, help="prefix length in tokens past which the drafter abstains")
    family: str = option("", help="drafters of one family are alike for the vote (empty: the kind's name)")

    def __post_init__(self) -> None:
        require(0 < self.vocab_size <= MAX_VOCAB_SIZE, "vocab_size", f"must be in 1..{MAX_VOCAB_SIZE}")
        require(self.context_limit > 0, "context_limit", "must be positive")


def require(holds: bool, name: str, rule: str) -> None:
    """Raises ConfigError naming the option when the rule does not hold."""
    if not holds:
        raise ConfigError(f"option {name} {rule}")


def parse_options(cls: type[OptionsT], kind: str, options: Mapping[str, object]) -> OptionsT:
    """Build `cls`. Raises ConfigError naming unknown or missing options and the known ones; None means the default."""
    names = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"unknown option of drafter kind {kind}: {', '.join(unknown)} (known: {', '.join(names)})")
    missing = [name for name, field in names.items() if field.default is dataclasses.MISSING and name not in given]
    if missing:
        raise ConfigError(f"drafter kind {kind} needs option {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {
        name: parse_value(value, hints[name], f"option {name} of drafter kind {kind}", names[name].metadata["choices"])
        for name, value in given.items()
    }
    return cls(**values)
