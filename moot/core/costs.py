"""Online fits of what drafting and verifying cost. No clock: durations, in seconds, are arguments."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

_OUTLIER: Final = 3.0
_RATE: Final = 0.1


class VerifyCost:
    """Seconds of one verify step as a function of the tokens in its batch.

    Samples are averaged in classes of batch size (1, 2, 3 to 4, 5 to 8, ...), older ones fading; between the classes'
    means the cost is linear, and it never falls with more tokens. Beyond what was seen it grows by at least
    `prior_slope` of a one-token step per token: a hopeful guess, so that larger steps are tried and then measured.
    A single step may count for no more than three times the mean of its class: pauses of the machine are no cost.
    """

    def __init__(self, prior_slope: float = 0.01, prior_seconds: float = 0.03) -> None:
        if prior_slope <= 0 or prior_seconds <= 0:
            raise ValueError("prior slope and seconds must be positive")
        self._prior_slope = prior_slope
        self._prior_seconds = prior_seconds
        # class: [samples (at most 1 / rate), mean tokens, mean seconds]
        self._classes: dict[int, list[float]] = {}
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._memo: dict[int, float] = {}

    def observe(self, batch_tokens: int, seconds: float) -> None:
        """One step: `batch_tokens` > 0 tokens in its forward pass took `seconds` > 0; other samples say nothing."""
        if batch_tokens <= 0 or not 0 < seconds < float("inf"):
            return
        entry = self._classes.setdefault((batch_tokens - 1).bit_length(), [0.0, 0.0, 0.0])
        if entry[0] >= 3:
            seconds = min(seconds, _OUTLIER * entry[2])
        entry[0] = min(entry[0] + 1, 1 / _RATE)
        entry[1] += (batch_tokens - entry[1]) / entry[0]
        entry[2] += (seconds - entry[2]) / entry[0]
        self._sizes = []
        self._memo = {}

    def seconds(self, batch_tokens: int) -> float:
        """Expected duration of a step with `batch_tokens` tokens; 0 tokens cost what 1 costs."""
        known = self._memo.get(batch_tokens)
        if known is None:
            known = self._memo[batch_tokens] = self._predict(max(batch_tokens, 1))
            if len(self._memo) > 4096:
                self._memo = {}
        return known

    def _predict(self, size: int) -> float:
        if not self._classes:
            return self._prior_seconds * (1 + self._prior_slope * (size - 1))
        if not self._sizes:
            self._fit()
        sizes, seconds = self._sizes, self._seconds
        index = bisect_left(sizes, size)
        if index == 0:
            return seconds[0] * (1 + self._prior_slope * (size - 1)) / (1 + self._prior_slope * (sizes[0] - 1))
        if index == len(sizes):
            slope = self._prior_slope * self._predict(1)
            if index > 1:
                slope = max(slope, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
            return seconds[-1] + slope * (size - sizes[-1])
        low, high = sizes[index - 1], sizes[index]
        part = (size - low) / (high - low)
        return seconds[index - 1] + part * (seconds[index] - seconds[index - 1])

    def _fit(self) -> None:
        """Means in order of size, pooled where a larger class came out cheaper (isotonic regression)."""
        blocks: list[list[float]] = []
        for key in sorted(self._classes):
            count, size, mean = self._classes[key]
            blocks.append([count, mean, 1.0])
            self._sizes.append(size)
            while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
                count, mean, members = blocks.pop()
                last = blocks[-1]
                last[1] = (last[0] * last[1] + count * mean) / (last[0] + count)
                last[0] += count
                last[2] += members
        self._seconds = [mean for _, mean, members in blocks for _ in range(int(members))]


class DraftCost:
    """Seconds the draft stage takes when K tokens are asked for: a fading linear fit, never falling with K."""

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        # Sums over samples: 1, k, k*k, seconds, k*seconds.
        self._sums = [0.0] * 5

    def observe(self, num_speculative_tokens: int, seconds: float) -> None:
        """Only rounds that drafted: K > 0."""
        if num_speculative_tokens <= 0 or not 0 <= seconds < float("inf"):
            return
        k = float(num_speculative_tokens)
        new = (1.0, k, k * k, seconds, k * seconds)
        self._sums = [old * self._decay + add for old, add in zip(self._sums, new, strict=True)]

    def seconds(self, num_speculative_tokens: int) -> float:
        """0 for K = 0, and before the first sample."""
        count, k, kk, total, weighted = self._sums
        if num_speculative_tokens <= 0 or count == 0:
            return 0.0
        mean_k, mean = k / count, total / count
        spread = kk / count - mean_k * mean_k
        # With one K only, nothing tells the start from the slope: the mean is the answer for every K.
        slope = max((weighted / count - mean_k * mean) / spread, 0.0) if spread > 1e-6 else 0.0
        return max(mean + slope * (num_speculative_tokens - mean_k), 0.0)
