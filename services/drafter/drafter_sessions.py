"""The sessions of one drafter: bounded in number, each owned by a stream, closed when idle for too long.

`Path` is what a drafter has ready after a session's prefix, and which of it was drafted ahead. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moot.core.types import Proposal
from moot.drafters.interface import Drafter
from services.drafter.drafter_commands import OpenSession, Propose, Stream

NOTHING = Proposal((), ())


@dataclass(frozen=True, slots=True)
class Settled:
    """Tokens drafted ahead whose fate is known. Used: proposed later on, or committed as guessed."""

    num_used: int = 0
    num_dropped: int = 0


@dataclass(slots=True)
class Path:
    """The path of a session. `chain`: what was drafted after the prefix and no commit has contradicted.

    Its first `num_claimed` tokens were drafted for an ask; the others ahead of one, and wait to be used or dropped.
    `goal`: the length to reach while no ask comes.
    """

    chain: Proposal = NOTHING
    num_claimed: int = 0
    goal: int = 0

    def __len__(self) -> int:
        return len(self.chain.token_ids)

    @property
    def wants_more(self) -> bool:
        return len(self) < self.goal

    def claim(self, num_tokens: int) -> Settled:
        """Claim so many tokens for an ask that has come: those that are ready are its own from now on."""
        claimed = max(min(num_tokens, len(self)), self.num_claimed)
        settled = Settled(num_used=claimed - self.num_claimed)
        self.num_claimed = claimed
        return settled

    def follow(self, token_ids: Sequence[int]) -> Settled:
        """Ids were committed, on whichever drafter's proposal: go on with what lies behind them, if they lie on the
        path."""
        same = 0
        for mine, committed in zip(self.chain.token_ids, token_ids, strict=False):
            if mine != committed:
                break
            same += 1
        num_ahead = len(self) - self.num_claimed
        num_used = max(same - self.num_claimed, 0)
        if same < min(len(self), len(token_ids)):
            self.clear()
            return Settled(num_used, num_ahead - num_used)
        self.chain = self.chain.part(same)
        self.num_claimed = max(self.num_claimed - same, 0)
        self.goal = max(self.goal - len(token_ids), 0)
        return Settled(num_used)

    def grow(self, chain: Proposal, *, is_ahead: bool) -> bool:
        """`chain` is the path made longer. False: it is no longer, so there is nothing more to be had here."""
        if len(chain.token_ids) <= len(self):
            return False
        if not is_ahead:
            self.num_claimed = len(chain.token_ids)
        self.chain = chain
        return True

    def head(self, num_tokens: int) -> Proposal:
        return self.chain.part(0, num_tokens)

    def clear(self) -> Settled:
        """Forget it all: the session ends, or what is asked for now is something else."""
        settled = Settled(num_dropped=len(self) - self.num_claimed)
        self.chain, self.num_claimed, self.goal = NOTHING, 0, 0
        return settled


Key = tuple[int, int]
"""Identity of the stream, session id on it."""


@dataclass(slots=True)
class PendingAsk:
    """An ask that waits. `expires_at`: monotonic seconds after which the answer is of no use, or None. `started_ns`:
    monotonic, when drafting for it began; 0: not yet."""

    expires_at: float | None
    started_ns: int = 0


@dataclass(slots=True, eq=False)
class DrafterSession:
    """A session of the drafter. `held`: the drafter kind's own session. `is_warm`: the drafter has prepared what it can
    before the first ask.

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
    """The sessions by key, least recently used first. Not thread-safe: the engine's thread only.

    `waiting`: the sessions with an ask that must be drafted for, by identity, the longest waiting first. `settle` is
    told what a session that ends leaves behind.
    """

    def __init__(self, drafter: Drafter[Any], max_sessions: int, settle: Callable[[Settled], None]) -> None:
        self._drafter = drafter
        self._max_sessions = max_sessions
        self._settle = settle
        self._sessions: dict[Key, DrafterSession] = {}
        self.waiting: dict[int, DrafterSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[DrafterSession]:
        return iter(self._sessions.values())

    def get(self, stream: Stream, session_id: int) -> DrafterSession | None:
        return self._sessions.get((id(stream), session_id))

    def open(self, stream: Stream, command: OpenSession, now: float) -> bool:
        """Open a session under a key that is free. False: every session waits for an answer and no more may be
        opened."""
        if len(self._sessions) >= self._max_sessions:
            idle = next((session for session in self if session.ask is None), None)
            if idle is None:
                return False
            self.close(idle.stream, idle.session_id)
        held = self._drafter.open(command.prefix, command.params)
        self._sessions[id(stream), command.session_id] = DrafterSession(
            stream, command.session_id, command.request_id, held, len(command.prefix), now
        )
        return True

    def touch(self, session: DrafterSession, now: float) -> None:
        """Note a use: the session is the most recently used one now."""
        session.used_at = now
        key = (id(session.stream), session.session_id)
        self._sessions[key] = self._sessions.pop(key)

    def close(self, stream: Stream, session_id: int) -> None:
        session = self._sessions.pop((id(stream), session_id), None)
        if session is not None:
            self.waiting.pop(id(session), None)
            self._settle(session.path.clear())
            self._drafter.close(session.held)

    def close_all(self) -> None:
        for session in list(self):
            self.close(session.stream, session.session_id)

    def close_idle(self, used_before: float) -> int:
        """Close sessions not used since, unless they wait for an answer; returns how many."""
        old = [session for session in self if session.used_at < used_before and session.ask is None]
        for session in old:
            self.close(session.stream, session.session_id)
        return len(old)
