"""The price of a row: how many draft tokens of which sessions a step verifies.

A step is worth its tokens less what they cost the tokens that would have come otherwise: tokens - R x seconds, where R
is the rate at which the verifier delivers tokens. At the optimum R is that optimum's own rate (Dinkelbach 1967, on
fractional programming), so the rate of the last steps will do. The best nodes of all sessions are taken while their
chance is above R times what the step grows by: much where rows are free, nothing where the verifier is full. No session
has a speculation length.
"""

from __future__ import annotations

from collections.abc import Sequence

from moot.core.stepping.step_times import StepTimes
from moot.core.voting.draft_trie import worth

_RATE = 0.02
"""How fast the rate of delivery follows the steps."""


class StepPrice:
    """Decides the rows of one verifier's steps."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._tokens_per_session = 1.0
        self._seconds = 0.0
        """Of a step, as measured at start: a slow moment of the machine is no reason to draft otherwise."""
        self.price = 0.0
        """Chance that a further row of the last step would have had to have."""

    def take(self, offers: Sequence[Sequence[float]], num_rows: int, most: int) -> list[int]:
        """How many of its leading nodes each session verifies in the next step.

        `offers`: per session the chances of its nodes, never rising. `num_rows` > 0: of the step without drafts, one a
        session. `most`: nodes that fit into it.
        """
        rate = self.delivered(num_rows)
        # Best first; of nodes that are equally good those of the first sessions fit.
        nodes = sorted([(-chance, index) for index, offer in enumerate(offers) for chance in offer])[: max(most, 0)]
        count = worth([-negated for negated, _ in nodes], 1.0, lambda n: rate * self.times.seconds(num_rows + n))
        self.price = rate * (self.times.seconds(num_rows + count + 1) - self.times.seconds(num_rows + count))
        taken = [0] * len(offers)
        for _, index in nodes[:count]:
            taken[index] += 1
        return taken

    def delivered(self, num_sessions: int) -> float:
        """Tokens per second that a step of so many sessions delivers."""
        return num_sessions * self._tokens_per_session / (self._seconds or self.times.seconds(num_sessions))

    def stepped(self, num_sessions: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of `num_rows` rows, and of no prompt, committed `num_tokens` of `num_sessions` sessions."""
        self.times.observe(num_rows, seconds)
        expected = self.times.seconds(num_rows)
        self._seconds += (_RATE if self._seconds else 1.0) * (expected - self._seconds)
        self._tokens_per_session += _RATE * (num_tokens / num_sessions - self._tokens_per_session)
