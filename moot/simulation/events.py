"""Simulated time: a queue of actions, and servers that work one job after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Timeline:
    """Actions in order of time, those of one moment in the order in which they were asked for. Seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._next_number = 0

    def after(self, seconds: float, action: Action) -> None:
        """Do an action after so many `seconds`, which are >= 0."""
        heappush(self._queue, (self.now + seconds, self._next_number, action))
        self._next_number += 1

    def run(self, until: float) -> None:
        """Do everything up to `until`, which is the time afterwards."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, action = heappop(queue)
            action()
        self.now = max(self.now, until)


class Cores:
    """Cores of one machine that all its processes share.

    A job has threads, which wait for each other all along. Jobs of one thread are short and wake up with precedence:
    while they are no more than the cores they run at full speed, and a job of several threads gets what they leave,
    though never less than its fair share. A pure model of Linux's scheduler at a distance; how near it comes is
    measured (lab.bench.simulate --validate).
    """

    def __init__(self, timeline: Timeline, num_cores: int) -> None:
        self._timeline = timeline
        self._num_cores = num_cores
        # [seconds left at full speed, threads, what to do then]
        self._jobs: list[tuple[list[float], int, Action]] = []
        self._at = 0.0
        self._version = 0

    def run(self, seconds: float, threads: int, done: Action) -> None:
        self._advance()
        self._jobs.append(([seconds], threads, done))
        self._plan()

    def _speeds(self) -> tuple[float, float]:
        """Speeds of jobs of one thread, and of jobs of several."""
        small = sum(1 for _, threads, _ in self._jobs if threads == 1)
        wanted = sum(min(threads, self._num_cores) for _, threads, _ in self._jobs)
        fair = min(1.0, self._num_cores / wanted) if wanted else 1.0
        left = max(self._num_cores - small, 0) / self._num_cores
        large = max(fair, left) if small < wanted else 1.0
        if small == wanted:
            return fair, 1.0
        taken = large * (wanted - small)
        return min(1.0, max(self._num_cores - taken, fair) / small) if small else 1.0, min(large, fair)

    def _advance(self) -> None:
        passed = self._timeline.now - self._at
        self._at = self._timeline.now
        if passed > 0:
            small, large = self._speeds()
            for left, threads, _ in self._jobs:
                left[0] -= passed * (small if threads == 1 else large)

    def _plan(self) -> None:
        self._version += 1
        if not self._jobs:
            return
        version = self._version
        small, large = self._speeds()
        wait = min(left[0] / (small if threads == 1 else large) for left, threads, _ in self._jobs)
        self._timeline.after(max(wait, 0.0), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [job for job in self._jobs if job[0][0] <= 1e-9]
        self._jobs = [job for job in self._jobs if job[0][0] > 1e-9]
        self._plan()
        for _, _, done in ended:
            done()


class Server:
    """One thread of execution: jobs in the order in which they came. `cores`: what it shares with others, if it does.

    What can wait is done where nothing else is there to do, or once it has waited for `most_wait_s`.
    """

    def __init__(self, timeline: Timeline, cores: Cores | None = None, most_wait_s: float = 0.005) -> None:
        self._timeline = timeline
        self._cores = cores
        self._most_wait_s = most_wait_s
        self._jobs: deque[tuple[float, Action]] = deque()
        self._waiting: deque[tuple[float, float, Action]] = deque()
        self._is_running = False
        self.busy_s = 0.0

    def work(self, seconds: float, done: Action) -> None:
        self._jobs.append((seconds, done))
        self._begin()

    def work_later(self, seconds: float, done: Action) -> None:
        """Work that others may overtake for a while."""
        self._waiting.append((self._timeline.now + self._most_wait_s, seconds, done))
        self._begin()

    def _begin(self) -> None:
        if not self._is_running:
            self._next()

    def _next(self) -> None:
        waiting = self._waiting
        self._is_running = bool(self._jobs or waiting)
        if not self._is_running:
            return
        if waiting and (not self._jobs or waiting[0][0] <= self._timeline.now):
            _, seconds, done = waiting.popleft()
        else:
            seconds, done = self._jobs.popleft()
        self.busy_s += seconds
        if self._cores is None:
            self._timeline.after(seconds, lambda: self._end(done))
        else:
            self._cores.run(seconds, 1, lambda: self._end(done))

    def _end(self, done: Action) -> None:
        done()
        self._next()
