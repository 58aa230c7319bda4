"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from moot.core.errors import ConfigError

T = TypeVar("T")


def named(what: str, name: str, choices: Mapping[str, T]) -> T:
    """`choices[name]`; raises ConfigError with the known names where there is none."""
    if name not in choices:
        raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
    return choices[name]
