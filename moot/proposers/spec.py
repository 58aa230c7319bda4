"""What a drafter kind hands to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from moot.proposers.base import Proposer
from moot.proposers.options import OptionsT


@dataclass(frozen=True, slots=True)
class Kind(Generic[OptionsT]):
    """A name, the closed schema of its options and what builds a proposer from them."""

    name: str
    options: type[OptionsT]
    build: Callable[[OptionsT], Proposer[Any]]
