"""Whether a verifier is alive: does it answer, and does its compute thread move while something waits for it."""

from __future__ import annotations

from moot.metrics import Metrics
from moot.v1 import verifier_service_pb2 as pb


class Heartbeats:
    """Of one stream: `hear` every answer to a beat, `judge` once per interval."""

    def __init__(self, max_missed: int, metrics: Metrics) -> None:
        self._max_missed = max_missed
        self._metrics = metrics
        self._heard = True
        self._num_missed = 0
        self._num_stuck = 0
        self._last_step = -1
        self._judged_step = -1
        self._num_queued = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether it has missed one or stood still for one, and is not given up yet."""
        return self._num_missed > 0 or self._num_stuck > 0

    def hear(self, heartbeat: pb.Heartbeat) -> None:
        self._heard = True
        self._last_step = heartbeat.step_counter
        self._num_queued = heartbeat.num_queued

    def judge(self) -> str | None:
        """One more interval is over. Why the verifier is lost; None: it is not."""
        self._num_missed = 0 if self._heard else self._num_missed + 1
        if not self._heard:
            self._metrics.heartbeats_missed.labels("missed").inc()
        stuck = self._num_queued > 0 and self._last_step == self._judged_step
        self._num_stuck = self._num_stuck + 1 if stuck else 0
        if stuck:
            self._metrics.heartbeats_missed.labels("stuck").inc()
        self._heard, self._judged_step = False, self._last_step
        if max(self._num_missed, self._num_stuck) < self._max_missed:
            return None
        word = "missed" if self._num_missed >= self._max_missed else "without progress"
        return f"{self._max_missed} heartbeats {word}"
