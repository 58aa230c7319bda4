"""Online fits of what drafting and verifying cost. No clock: durations, in seconds, are arguments."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import sqrt
from typing import Final

_OUTLIER: Final = 3.0
_RATE: Final = 0.04
_DOUBT: Final = 0.3

_FRESH: Final = 120
_HALF_LIFE: Final = 90
_FORGOTTEN: Final = 500
"""Steps without a sample: up to 120 nothing happens, from there samples count half every 90, from 500 on nothing. In
virtual time half of that is too little for one request with costly drafters, whose K then keeps moving."""

_FINE: Final = 32
_TILED: Final = 128

_IDLE: Final = 0.997
"""What a round that drafts nothing leaves of what is known of draft times."""

_SPREAD: Final = 0.1
"""How far durations are taken to lie from their expectation before any has been seen, as a part of it."""
_SPREAD_RATE: Final = 0.02

_WAITING: Final = 0.1
"""Part of a round spent waiting for the verifier from which it counts as never resting."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Mean times of rounds, in seconds: all in all, and of that drafting, waiting for a step to begin, and in the
    step."""

    total: float
    drafting: float
    waiting: float
    forward: float

    def moved(self, new: RoundTimes, rate: float) -> RoundTimes:
        """A running mean, moved towards `new`."""
        return RoundTimes(
            self.total + rate * (new.total - self.total),
            self.drafting + rate * (new.drafting - self.drafting),
            self.waiting + rate * (new.waiting - self.waiting),
            self.forward + rate * (new.forward - self.forward),
        )

    @property
    def overhead(self) -> float:
        return max(self.total - self.drafting - self.waiting - self.forward, 0.0)

    @property
    def num_turns(self) -> float:
        """Steps per round of a verifier that never rests, where requests wait for it; 1 where they do not."""
        if self.forward <= 0 or self.total <= self.forward:
            return 1.0
        return 1.0 + (self.total / self.forward - 1.0) * min(self.waiting / (_WAITING * self.total), 1.0)


def _class_of(size: int) -> int:
    """Class of a batch size: 1, 2, 3 to 4, every 4 up to 32, every 8 up to 128, then twice as many."""
    if size <= 4:
        return (size - 1).bit_length()
    if size <= _FINE:
        return 2 + (size - 1) // 4
    if size <= _TILED:
        return 6 + (size - 1) // 8
    return 15 + (size - 1).bit_length()


class VerifyCost:
    """Seconds of one verify step as a function of the tokens in its batch.

    Samples are averaged in classes of batch size (1, 2, 3 to 4, every 4 up to 32, every 8 up to 128, then twice as
    many: fine enough for the size from which rows are expensive), older ones fading; between the classes' means the
    cost is linear, and it never falls with more tokens. Beyond what was seen it grows by at least `prior_slope` of a
    one-token step per token, and below it falls in proportion: hopeful guesses, so that larger and smaller steps are
    tried and then measured. A class with few samples is taken to be cheaper than their mean, and one that was not seen
    for long has few: they count half after every 90 steps from the 120th on without one, and are forgotten in the end.
    What a slow moment of the machine said about a size that has not been tried since would keep it from being tried
    again. A single step may count for no more than three times the mean of its class: pauses of the machine are no
    cost.
    """

    def __init__(self, prior_slope: float = 0.01, prior_seconds: float = 0.03) -> None:
        if prior_slope <= 0 or prior_seconds <= 0:
            raise ValueError("prior slope and seconds must be positive")
        self._prior_slope = prior_slope
        self._prior_seconds = prior_seconds
        # class: [samples (at most 1 / rate), mean tokens, mean seconds, steps when it was last seen]
        self._classes: dict[int, list[float]] = {}
        self._num_steps = 0.0
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._memo: dict[int, float] = {}
        self.spread = _SPREAD
        """Mean distance of a step's duration from its class's mean, as a part of the mean."""

    def observe(self, batch_tokens: int, seconds: float, weight: float = 1.0) -> None:
        """One step: `batch_tokens` > 0 tokens in its forward pass took `seconds` > 0; other samples say nothing.

        `weight`, in (0, 1]: of a step that n requests report, each report is worth 1 / n.
        """
        if batch_tokens <= 0 or not 0 < seconds < float("inf"):
            return
        self._num_steps += weight
        entry = self._classes.setdefault(_class_of(batch_tokens), [0.0, 0.0, 0.0, 0.0])
        entry[0], entry[3] = self._count(entry), self._num_steps
        if entry[0] >= 3:
            seconds = min(seconds, _OUTLIER * entry[2])
            self.spread += _SPREAD_RATE * weight * (abs(seconds / entry[2] - 1) - self.spread)
        entry[0] = min(entry[0] + weight, 1 / _RATE)
        entry[1] += weight * (batch_tokens - entry[1]) / entry[0]
        entry[2] += weight * (seconds - entry[2]) / entry[0]
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
            return seconds[0] * min(size / sizes[0], 1.0)
        if index == len(sizes):
            slope = self._prior_slope * seconds[0]
            if index > 1:
                slope = max(slope, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
            return seconds[-1] + slope * (size - sizes[-1])
        low, high = sizes[index - 1], sizes[index]
        part = (size - low) / (high - low)
        return seconds[index - 1] + part * (seconds[index] - seconds[index - 1])

    @staticmethod
    def _doubt(count: float) -> float:
        """How far below its mean a class may lie: one slow step must not keep a size from ever being tried again."""
        return max(_DOUBT * (1 / sqrt(max(count, 1.0)) - sqrt(_RATE)), 0.0)

    def _count(self, entry: list[float]) -> float:
        """Samples that the class is still worth."""
        age = self._num_steps - entry[3] - _FRESH
        return float(entry[0] * 0.5 ** (max(age, 0.0) / _HALF_LIFE))

    def _fit(self) -> None:
        """Means in order of size, pooled where a larger class came out cheaper (isotonic regression)."""
        blocks: list[list[float]] = []
        oldest = self._num_steps - _FORGOTTEN
        self._classes = {key: entry for key, entry in self._classes.items() if entry[3] >= oldest}
        for key in sorted(self._classes):
            _, size, mean, _ = self._classes[key]
            count = self._count(self._classes[key])
            blocks.append([count, mean * (1 - self._doubt(count)), 1.0])
            self._sizes.append(size)
            while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
                count, mean, members = blocks.pop()
                last = blocks[-1]
                last[1] = (last[0] * last[1] + count * mean) / (last[0] + count)
                last[0] += count
                last[2] += members
        self._seconds = [mean for _, mean, members in blocks for _ in range(int(members))]


class DraftCost:
    """Seconds the draft stage takes when K tokens are asked for: a fading linear fit, never falling with K.

    With one K only, nothing tells the start from the slope: `origin`, the weight of a sample of 0 s at K = 0, then lays
    the line through the origin. That is a hopeful guess for a shorter K, so that it is tried and then measured.
    """

    def __init__(self, decay: float = 0.98, origin: float = 0.5) -> None:
        self._decay = decay
        self._origin = origin
        # Sums over samples: 1, k, k*k, seconds, k*seconds.
        self._sums = [0.0] * 5
        self.spread = _SPREAD
        """Mean distance of a draft's duration from what was expected, as a part of that."""

    def observe(self, num_speculative_tokens: int, seconds: float, weight: float = 1.0) -> None:
        """Learn from a round. One that drafted nothing, K = 0, lets what is known fade: it would keep what a slow
        moment of the drafters said from being tried again. `weight`, in (0, 1]: as in VerifyCost."""
        if num_speculative_tokens <= 0:
            self._sums = [each * _IDLE**weight for each in self._sums]
            return
        if not 0 <= seconds < float("inf"):
            return
        if self._sums[0] >= 3:
            expected = self.seconds(num_speculative_tokens)
            seconds = min(seconds, _OUTLIER * expected + 1e-3)
            if expected > 0:
                self.spread += _SPREAD_RATE * weight * (abs(seconds / expected - 1) - self.spread)
        k = float(num_speculative_tokens)
        new = (1.0, k, k * k, seconds, k * seconds)
        decay = self._decay**weight
        self._sums = [old * decay + weight * add for old, add in zip(self._sums, new, strict=True)]

    def forget(self) -> None:
        """Other drafters are asked from now on."""
        self._sums = [0.0] * 5

    def seconds(self, num_speculative_tokens: int) -> float:
        """Expected duration of the draft stage at K; 0 for K = 0, and before the first sample."""
        count, k, kk, total, weighted = self._sums
        if num_speculative_tokens <= 0 or count == 0:
            return 0.0
        count += self._origin
        mean_k, mean = k / count, total / count
        spread = kk / count - mean_k * mean_k
        slope = max((weighted / count - mean_k * mean) / spread, 0.0) if spread > 1e-6 else 0.0
        return max(mean + slope * (num_speculative_tokens - mean_k), 0.0)
