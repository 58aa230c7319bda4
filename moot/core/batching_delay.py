"""The batching delay: how long a step waits for sessions that were just answered and will have their next draft soon.

A step that starts as soon as the first draft is here leaves the others behind: requests fall into two groups that take
turns, each in a batch half as large. Where a step of all takes hardly longer than one of half of them, that costs up to
half of the throughput; and while a long prompt is read, a request whose draft comes a millisecond late waits for two
chunks instead of one. A session that is usually back within `share` of a step is waited for; no other is. The wait
changes which sessions share a step, so (in batch-invariant mode) no bit of any answer. Pure; times in nanoseconds, no
clock.
"""

from __future__ import annotations

CPU_SHARE = 0.5
"""Where steps are long beside drafting and a step of all takes hardly longer than one of half of them. On a GPU with
draft models the simulation says otherwise (lab.bench.simulate, report `overlap`): requests in two groups hide
drafting in each other's steps, and waiting shows it again."""
_RATE = 0.2
_PATIENCE = 2
"""Times its usual turnaround that a session is waited for, but at least `_LEAST` of the longest wait: a session that is
left out for a hair waits for a whole step."""
_LEAST = 0.25


class BatchingDelay:
    """Tells how long the next step waits for the sessions that the last one answered. Sessions are numbers. `share`:
    part of the last step's time that a wait may take; 0: none."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._step_ns = 0
        self._answered: dict[int, int] = {}
        """When each session without work was answered."""
        self._awaited: dict[int, int] = {}
        """Of those answered by the last step: until when each is waited for."""
        self._usual: dict[int, float] = {}
        """Each session's turnaround from answer to next command, fading."""

    def __len__(self) -> int:
        """Sessions of which something is kept."""
        return len(self._answered.keys() | self._usual.keys())

    def stepped(self, duration_ns: int) -> None:
        """A step begins to hand out its answers."""
        self._step_ns = duration_ns
        self._awaited.clear()

    def answered(self, session: int, now_ns: int) -> None:
        """The session has its answer, no work now, and goes on."""
        self._answered[session] = now_ns
        limit, usual = self._share * self._step_ns, self._usual.get(session)
        if usual is None:
            self._awaited[session] = now_ns + int(limit)
        elif usual <= limit:
            self._awaited[session] = now_ns + int(min(limit, max(_PATIENCE * usual, _LEAST * limit)))

    def came(self, session: int, now_ns: int) -> None:
        """The session has sent its next command."""
        self._awaited.pop(session, None)
        since = self._answered.pop(session, None)
        if since is not None:
            taken = float(max(now_ns - since, 0))
            usual = self._usual.get(session, taken)
            self._usual[session] = usual + _RATE * (taken - usual)

    def ended(self, session: int) -> None:
        for table in (self._awaited, self._answered, self._usual):
            table.pop(session, None)

    def seconds_left(self, now_ns: int) -> float:
        """How long the next step should still wait: until the last awaited session is due, 0 when none is awaited."""
        return max(0.0, (max(self._awaited.values(), default=now_ns) - now_ns) / 1e9)
