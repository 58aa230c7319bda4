"""Costs of a step and of a draft, in seconds: measured tables, and straight lines where nothing was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one verify step by its rows, its requests and the tokens that they attend to.

    `table`: number of requests to (rows, seconds), rows rising; between its points the cost is linear in both, and
    beyond the last two it goes on as between them. Added are `prefill_token_s` for each token of a prefill chunk and
    `context_token_s` for each token of the requests' prefixes.
    """

    table: Mapping[int, Sequence[tuple[float, float]]]
    prefill_token_s: float = 0.0
    context_token_s: float = 0.0
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.table or any(not points for points in self.table.values()):
            raise ValueError("a table of step times needs points")
        object.__setattr__(self, "_counts", sorted(self.table))

    @classmethod
    def line(cls, base_s: float, row_s: float, free_rows: int = 0, prefill_token_s: float | None = None) -> StepCost:
        """A straight line: `base_s` up to `free_rows` rows, and `row_s` more for each further one."""
        rows = max(free_rows, 1)
        points = ((0.0, base_s), (float(rows), base_s), (rows + 1.0, base_s + row_s))
        return cls({1: points}, row_s if prefill_token_s is None else prefill_token_s)

    def stretched(self, factor: float) -> StepCost:
        """These costs with every step `factor` times as long."""
        table = {count: [(rows, factor * cost) for rows, cost in points] for count, points in self.table.items()}
        return StepCost(table, factor * self.prefill_token_s, factor * self.context_token_s)

    def seconds(self, rows: int, requests: int, prefill_tokens: int = 0, context_tokens: int = 0) -> float:
        """Seconds of a step with `rows` verified rows of `requests` requests, whose prefixes are `context_tokens` in
        sum, and a prefill chunk."""
        counts = self._counts
        index = bisect_left(counts, requests)
        if index == 0 or len(counts) == 1:
            cost = _on_line(self.table[counts[0]], rows)
        else:
            low, high = counts[min(index, len(counts) - 1) - 1], counts[min(index, len(counts) - 1)]
            first, second = _on_line(self.table[low], rows), _on_line(self.table[high], rows)
            cost = first + (second - first) * (requests - low) / (high - low)
        return cost + prefill_tokens * self.prefill_token_s + context_tokens * self.context_token_s


def _on_line(points: Sequence[tuple[float, float]], at: float) -> float:
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    index = min(bisect_left(points, (at, 0.0)), len(points) - 1)
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True, slots=True)
class DraftTime:
    """Seconds of one batch of a drafter: `start_s`, `token_s` for each token of its longest chain, and `request_s` for
    each request beyond the first."""

    start_s: float = 0.0
    token_s: float = 0.003
    request_s: float = 0.0

    def seconds(self, num_tokens: int, num_requests: int) -> float:
        return self.start_s + self.token_s * num_tokens + self.request_s * (num_requests - 1)
