"""Bounds of everything that waits for a verifier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """Bounds of everything that waits for a verifier; durations in seconds."""

    heartbeat_interval_s: float = 1.0
    max_missed_heartbeats: int = 3
    open_timeout_s: float = 300.0
    verify_timeout_s: float = 60.0
    no_verifier_wait_s: float = 10.0
    retry_after_s: float = 1.0
    max_moves: int = 3
    max_kills: int = 2
    probation_wait_s: float = 5.0
    capacity_retry_s: float = 0.1
    max_shortages: int = 3
    """Verifiers without memory for a request, one after the other, until it fails."""
