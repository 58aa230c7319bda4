"""The sessions of one drafter: bounded in number, each owned by a stream, closed when idle for too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moot.proposers.base import Chain, Proposer
from services.drafter.commands import Open, Propose, Stream

Key = tuple[int, int]
"""Identity of the stream, session id on it."""


@dataclass(slots=True)
class PendingAsk:
    """`expires_at`: monotonic seconds after which the answer is of no use, or None."""

    command: Propose
    expires_at: float | None


@dataclass(slots=True, eq=False)
class Session:
    """`held`: the proposer's own session. `path`: drafted past the prefix and not yet contradicted by commits."""

    stream: Stream
    session_id: int
    request_id: str
    held: Any
    length: int
    used_at: float
    ask: PendingAsk | None = None
    path: Chain = field(default_factory=lambda: Chain((), ()))
    path_goal: int = 0
    """Length that the path is to reach while idle; 0: it is not drafted ahead."""
    is_warm: bool = False

    def follow(self, token_ids: tuple[int, ...]) -> None:
        """Committed ids: what the path still says after them, if they lie on it."""
        count = len(token_ids)
        if self.path.token_ids[:count] == token_ids:
            self.path = Chain(self.path.token_ids[count:], self.path.confidences[count:])
            self.path_goal = max(self.path_goal - count, 0)
        else:
            self.path, self.path_goal = Chain((), ()), 0


class SessionTable:
    """Least recently used first. Not thread-safe: the engine's thread only."""

    def __init__(self, proposer: Proposer[Any], max_sessions: int) -> None:
        self._proposer = proposer
        self._max_sessions = max_sessions
        self._sessions: dict[Key, Session] = {}

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
