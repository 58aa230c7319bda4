"""Outlier ejection: after three failures a drafter is ejected for a time that grows; no clock of its own.

A failure is a malformed answer, or one that missed its round's vote. Of the latter only those in a row count: an answer
in time forgives them. One hiccup is one failure, however many requests saw it: a failure needs a question that was
asked after the failure before. The n-th ejection in a row lasts n times the first; a long time without one resets n.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moot.core.options import Options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionPolicy(Options):
    """Options of outlier ejection; durations in seconds."""

    ejection_failures: int = option(3, help="late or malformed answers until a drafter is ejected", minimum=1)
    eject_s: float = option(
        30.0, help="seconds of the first ejection; the n-th in a row lasts n times as long", above=0
    )
    warm_up_s: float = option(
        2.0,
        flag="drafter_warm_up_s",
        help="seconds in which a drafter may read a prompt before lateness counts",
        minimum=0,
    )
    """Misses of a session's first answer count only from a drafter that has answered no request for this long."""
    memory_s: float = option(
        300.0,
        flag="ejection_memory_s",
        help="seconds after which malformed answers and ejections are forgotten",
        minimum=0,
    )
    """Malformed answers older than this are forgotten, and so is the count of ejections after as long without one."""


@dataclass(slots=True)
class OutlierEjection:
    policy: EjectionPolicy
    _malformed_at: list[float] = field(default_factory=list)
    _num_missed: int = 0
    _last_failure_at: float = float("-inf")
    _num_ejections: int = 0
    _ejected_until: float = float("-inf")

    def answered(self) -> None:
        """Note a good answer that came in time."""
        self._num_missed = 0

    def malformed(self, asked_at: float, now: float) -> float | None:
        """Note a malformed answer. Returns how long to eject for, if this was the last failure."""
        if asked_at <= self._last_failure_at:
            return None
        self._malformed_at.append(now)
        return self._failure(now)

    def missed(self, asked_at: float, now: float) -> float | None:
        """Note an answer that did not come in time; returns as `malformed`."""
        if asked_at <= self._last_failure_at:
            return None
        self._num_missed += 1
        return self._failure(now)

    def _failure(self, now: float) -> float | None:
        self._last_failure_at = now
        self._malformed_at = [at for at in self._malformed_at if now - at <= self.policy.memory_s]
        if len(self._malformed_at) + self._num_missed < self.policy.ejection_failures:
            return None
        if now - self._ejected_until > self.policy.memory_s:
            self._num_ejections = 0
        self._num_ejections += 1
        self._malformed_at.clear()
        self._num_missed = 0
        duration = self.policy.eject_s * self._num_ejections
        self._ejected_until = now + duration
        return duration
