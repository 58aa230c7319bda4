"""Whether a step waits a moment for drafts that are on their way.

A session whose draft was left has none until the router has heard of it, asked and sent one. A step that begins before
loses what the draft's first token would have brought, and a step that waits delays every session. Times are arguments,
in seconds; there is no clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

_RATE = 0.1
_SLACK = 1.05
"""A draft that is a little late is still worth its wait."""


@dataclass(slots=True)
class _Expected:
    base_length: int
    answered_at: float


class DraftWait:
    """The waits of one verifier."""

    def __init__(self) -> None:
        self._expected: dict[Hashable, _Expected] = {}
        self._turnaround: float | None = None
        """From an answer to the first draft for the text that it completes; and its mean deviation."""
        self._deviation = 0.0
        self._first = 0.0
        """Chance that the first token of such a draft is right, all branches together."""
        self._comes = 1.0
        """Part of the texts for which a draft comes at all before the next is committed."""

    def answered(self, session: Hashable, base_length: int, now: float) -> None:
        """A session has committed a text of so many tokens, and holds no draft."""
        if session in self._expected:
            self._comes -= _RATE * self._comes
        self._expected[session] = _Expected(base_length, now)

    def came(self, session: Hashable, base_length: int, first: float, now: float) -> None:
        """A draft has come; `first`: chances of its first tokens in sum."""
        expected = self._expected.get(session)
        if expected is None or expected.base_length != base_length:
            return
        del self._expected[session]
        self._comes += _RATE * (1 - self._comes)
        took = now - expected.answered_at
        if self._turnaround is None:
            self._turnaround, self._first = took, first
            return
        self._deviation += _RATE * (abs(took - self._turnaround) - self._deviation)
        self._turnaround += _RATE * (took - self._turnaround)
        self._first += _RATE * (first - self._first)

    def ended(self, session: Hashable) -> None:
        """The session has ended, or can take no draft."""
        self._expected.pop(session, None)

    def seconds_left(self, now: float, ready_at: float, num_sessions: int, rate: float, step_seconds: float) -> float:
        """How long the next step waits. `ready_at`: when it could have begun; `rate`: tokens a second that all
        `num_sessions` deliver; `step_seconds`: of a usual step, the longest wait."""
        if self._turnaround is None:
            return 0.0
        takes = _SLACK * self._turnaround + 2 * self._deviation
        due = sorted([one.answered_at + takes for one in self._expected.values() if one.answered_at + takes > now])
        # A step without drafts brings one token where a usual one brings more.
        worth = self._comes * (self._first + rate * step_seconds / num_sessions - 1)
        best, until = 0.0, now
        for count, at in enumerate(due, 1):
            if at > ready_at + step_seconds:
                break
            gain = count * worth - rate * (at - now)
            if gain > best:
                best, until = gain, at
        return until - now
