"""How long a step takes by its rows: measured at start, kept fitted, and deaf to a machine that is slow for a while.

What a row costs compared with another decides what is drafted; how fast the machine is at this moment does not. So the
shape of the curve is kept apart from its scale: a process that takes the cores makes all steps slower, which moves the
scale, and steps of one size slower than steps of another, for as long as that lasts, which moves the shape slowly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

_SHAPE_RATE = 0.005
"""How far a point of the curve follows one step."""
_SCALE_RATE = 0.1
_MOST_SHIFT = 0.1
"""A step tells of at most so much more or less than expected of its size,"""
_ELSEWHERE = 0.3
"""and one that is so far off tells of something else on the machine."""


class StepTimes:
    """Seconds of a step by its rows, on the machine as it was when it was measured.

    Linear between measured points; beyond the last two it goes on as between them.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        """`measured`: rows > 0 to seconds > 0, two sizes at least."""
        if len(measured) < 2 or min(measured) < 1 or min(measured.values()) <= 0:
            raise ValueError("step times need two sizes or more, rows from 1 and seconds above 0")
        self._rows = sorted(measured)
        self._seconds: list[float] = []
        for rows in self._rows:
            # More rows never take less: what was measured so was noise.
            self._seconds.append(max(measured[rows], self._seconds[-1] if self._seconds else 0.0))
        self.scale = 1.0
        """How much longer steps take now than when they were measured."""

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a step with so many rows; fewer than the smallest size cost what that costs."""
        right, part = self._place(num_rows)
        below, above = self._seconds[right - 1], self._seconds[right]
        return below + (above - below) * part

    def _place(self, num_rows: int) -> tuple[int, float]:
        """The point above so many rows, and which part of the way to it from the point below they are: from 0 on, above
        1 beyond the last."""
        right = max(min(bisect_right(self._rows, num_rows), len(self._rows) - 1), 1)
        low, high = self._rows[right - 1], self._rows[right]
        return right, max((num_rows - low) / (high - low), 0.0)

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows, and of no prompt, took so long."""
        if num_rows < 1 or seconds <= 0:
            return
        # One pause of the machine is no measure of it.
        ratio = min(max(seconds / self.seconds(num_rows), self.scale / 2), 2 * self.scale)
        apart = ratio / self.scale - 1
        self.scale += _SCALE_RATE * (ratio - self.scale)
        if abs(apart) > _ELSEWHERE:
            return
        shift = min(max(apart, -_MOST_SHIFT), _MOST_SHIFT)
        right, part = self._place(num_rows)
        part = min(part, 1.0)
        for index, share in ((right - 1, 1 - part), (right, part)):
            self._seconds[index] *= 1 + _SHAPE_RATE * share * shift
        self._keep_rising(right)

    def _keep_rising(self, around: int) -> None:
        seconds = self._seconds
        for index in range(around, len(seconds)):
            seconds[index] = max(seconds[index], seconds[index - 1])
        for index in range(around - 1, 0, -1):
            seconds[index - 1] = min(seconds[index - 1], seconds[index])
