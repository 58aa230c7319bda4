"""The sessions of one drafter: bounded in number, each owned by a stream, closed when idle for too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moot.proposers.base import Proposer
from services.drafter.commands import Open, Propose, Stream
from services.drafter.path import Path, Settled

Key = tuple[int, int]
"""Identity of the stream, session id on it."""


@dataclass(slots=True)
class PendingAsk:
    """`expires_at`: monotonic seconds after which the answer is of no use, or None. `started_ns`: monotonic, when
    drafting for it began; 0: not yet."""

    command: Propose
    expires_at: float | None
    started_ns: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """`held`: the proposer's own session. `is_warm`: the proposer has prepared what it can before the first ask.

    `asked`: the last question, answered or not. `is_followed`: the text went on along the path up to that question.
    """

    stream: Stream
    session_id: int
    request_id: str
    held: Any
    length: int
    used_at: float
    ask: PendingAsk | None = None
    asked: Propose | None = None
    is_followed: bool = False
    path: Path = field(default_factory=Path)
    is_warm: bool = False


class SessionTable:
    """Least recently used first. Not thread-safe: the engine's thread only.

    `waiting`: the sessions with an ask that must be drafted for, by identity, the longest waiting first. `settle` is
    told what a session that ends leaves behind.
    """

    def __init__(self, proposer: Proposer[Any], max_sessions: int, settle: Callable[[Settled], None]) -> None:
        self._proposer = proposer
        self._max_sessions = max_sessions
        self._settle = settle
        self._sessions: dict[Key, Session] = {}
        self.waiting: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, stream: Stream, session_id: int) -> Session | None:
        return self._sessions.get((id(stream), session_id))

    def open(self, stream: Stream, command: Open, now: float) -> bool:
        """The key must be free. False: every session waits for an answer and no more may be opened."""
        if len(self._sessions) >= self._max_sessions:
            idle = next((session for session in self if session.ask is None), None)
            if idle is None:
                return False
            self.close(idle.stream, idle.session_id)
        held = self._proposer.open(command.prefix, command.params)
        self._sessions[id(stream), command.session_id] = Session(
            stream, command.session_id, command.request_id, held, len(command.prefix), now
        )
        return True

    def touch(self, session: Session, now: float) -> None:
        """Most recently used from here on."""
        session.used_at = now
        key = (id(session.stream), session.session_id)
        self._sessions[key] = self._sessions.pop(key)

    def close(self, stream: Stream, session_id: int) -> None:
        session = self._sessions.pop((id(stream), session_id), None)
        if session is not None:
            self.waiting.pop(id(session), None)
            self._settle(session.path.clear())
            self._proposer.close(session.held)

    def close_all(self) -> None:
        for session in list(self):
            self.close(session.stream, session.session_id)

    def close_idle(self, used_before: float) -> int:
        """Close sessions not used since, unless they wait for an answer; returns how many."""
        old = [session for session in self if session.used_at < used_before and session.ask is None]
        for session in old:
            self.close(session.stream, session.session_id)
        return len(old)
