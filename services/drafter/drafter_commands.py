"""The commands of a stream to the drafter's engine, and the engine's answers. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moot.core.types import Proposal, SamplingParams


@dataclass(frozen=True, slots=True)
class OpenSession:
    session_id: int
    request_id: str
    prefix: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask for proposals. `base_length`: the prefix's length after appending `committed_token_ids`. `deadline_ms` 0:
    none."""

    session_id: int
    round_index: int
    base_length: int
    committed_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    width: int = 1
    top_candidates: tuple[tuple[int, ...], ...] = ()
    deadline_ms: int = 0
    takes_ahead: bool = False
    is_answered: bool = False
    """The router has the proposal already, out of an Ahead: go on from there."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close a session, finished or aborted: to a drafter it is the same."""

    session_id: int


Command = OpenSession | Propose | Close


@dataclass(frozen=True, slots=True)
class Proposed:
    session_id: int
    round_index: int
    base_length: int
    proposals: tuple[Proposal, ...]
    drafted_ns: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is drafted ahead, told before it is asked for. `path`: everything ready after `base_length`."""

    session_id: int
    round_index: int
    base_length: int
    path: Proposal


@dataclass(frozen=True, slots=True)
class Unknown:
    """The session does not exist, or its prefix has another length: open it again."""

    session_id: int
    round_index: int


Answer = Proposed | Ahead | Unknown


class Stream(Protocol):
    """The stream that answers go to. Called from the engine's thread; must not block."""

    def deliver(self, answers: Sequence[Answer]) -> None: ...
