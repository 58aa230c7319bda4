"""Calibration: running hit rates of drafters and of vote shares, with a Beta prior and decay.

`Calibration`: per drafter, by bin of the confidence byte and depth. `ShareAcceptance`: for a node of the trie, by its
share of the vote and depth. Both serve all requests of a router and are learned from committed text; nothing in the
text depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CONFIDENCE_BIN_SHIFT: Final = 4
NUM_CONFIDENCE_BINS: Final = 256 >> CONFIDENCE_BIN_SHIFT
NUM_CONFIDENCE_DEPTHS: Final = 8
"""Deeper tokens share the last class."""

NUM_SHARE_BINS: Final = 10
NUM_SHARE_DEPTHS: Final = 8


class DrafterTable:
    """Hit rate of one drafter, given that its proposal was right up to the token.

    A bin starts from Beta(hits, misses); a (bin, depth) cell starts from its bin, worth `cell_strength` tokens, since
    most cells see few tokens. With every token the older ones of the same cell are worth `decay` of what they were.
    """

    __slots__ = ("_bin_hits", "_bin_tokens", "_cell_strength", "_decay", "_hits", "_tokens")

    def __init__(
        self,
        prior_hits: float = 1.0,
        prior_misses: float = 2.0,
        cell_strength: float = 4.0,
        decay: float = 0.995,
    ) -> None:
        if prior_hits <= 0 or prior_misses <= 0 or cell_strength <= 0 or not 0 < decay <= 1:
            raise ValueError("priors and strength must be positive, decay in (0, 1]")
        self._bin_hits = [prior_hits] * NUM_CONFIDENCE_BINS
        self._bin_tokens = [prior_hits + prior_misses] * NUM_CONFIDENCE_BINS
        cells = NUM_CONFIDENCE_BINS * NUM_CONFIDENCE_DEPTHS
        self._hits = [0.0] * cells
        self._tokens = [0.0] * cells
        self._cell_strength = cell_strength
        self._decay = decay

    def rate(self, confidence: int, depth: int) -> float:
        """Probability, in (0, 1), that a token with this confidence byte at this depth is the target's."""
        index = confidence >> CONFIDENCE_BIN_SHIFT
        cell = index * NUM_CONFIDENCE_DEPTHS + (depth if depth < NUM_CONFIDENCE_DEPTHS else NUM_CONFIDENCE_DEPTHS - 1)
        strength = self._cell_strength
        prior = self._bin_hits[index] / self._bin_tokens[index]
        return (self._hits[cell] + strength * prior) / (self._tokens[cell] + strength)

    def fixed(self) -> FixedRates:
        """All rates as they are now."""
        depths = range(NUM_CONFIDENCE_DEPTHS)
        bins = [index << CONFIDENCE_BIN_SHIFT for index in range(NUM_CONFIDENCE_BINS)]
        return FixedRates(tuple([self.rate(confidence, depth) for confidence in bins for depth in depths]))

    def record(self, confidence: int, depth: int, hit: bool) -> None:
        """Count one token whose predecessors in the proposal were all right."""
        index = confidence >> CONFIDENCE_BIN_SHIFT
        cell = index * NUM_CONFIDENCE_DEPTHS + (depth if depth < NUM_CONFIDENCE_DEPTHS else NUM_CONFIDENCE_DEPTHS - 1)
        decay = self._decay
        self._bin_hits[index] = self._bin_hits[index] * decay + hit
        self._bin_tokens[index] = self._bin_tokens[index] * decay + 1.0
        self._hits[cell] = self._hits[cell] * decay + hit
        self._tokens[cell] = self._tokens[cell] * decay + 1.0


class FixedRates:
    """The rates of a `DrafterTable` at one moment; those of a bin's depths stand together."""

    __slots__ = ("rates",)

    def __init__(self, rates: tuple[float, ...]) -> None:
        self.rates = rates

    def rate(self, confidence: int, depth: int) -> float:
        """As `DrafterTable.rate`."""
        last = NUM_CONFIDENCE_DEPTHS - 1
        return self.rates[
            (confidence >> CONFIDENCE_BIN_SHIFT) * NUM_CONFIDENCE_DEPTHS + (depth if depth < last else last)
        ]


class Calibration:
    """A `DrafterTable` per drafter, made when first asked for."""

    def __init__(self, decay: float = 0.995) -> None:
        self._decay = decay
        self._tables: dict[str, DrafterTable] = {}

    def of(self, drafter_id: str) -> DrafterTable:
        table = self._tables.get(drafter_id)
        if table is None:
            table = self._tables[drafter_id] = DrafterTable(decay=self._decay)
        return table

    def forget(self, drafter_id: str) -> None:
        """Drop the table of a drafter that is gone for good, or stands for another model now."""
        self._tables.pop(drafter_id, None)


class ShareAcceptance:
    """How far shares of the vote are from what is accepted, by bucket of share and depth: accepted over expected.

    A node's acceptance is its share times that ratio, so that within a bucket shares keep their order: the many small
    ones share a bucket, and a tree is chosen among them. A ratio starts from `prior_scale`, worth `strength` expected
    tokens: 1 where the share is itself a probability (calibrated), less where it only says how many agree.
    """

    __slots__ = ("_accepted", "_decay", "_expected", "_prior_scale", "_strength")

    def __init__(self, prior_scale: float = 1.0, strength: float = 32.0, decay: float = 0.999) -> None:
        if not 0 < prior_scale <= 1 or strength <= 0 or not 0 < decay <= 1:
            raise ValueError("prior_scale and decay must be in (0, 1], strength positive")
        cells = NUM_SHARE_BINS * NUM_SHARE_DEPTHS
        self._accepted = [0.0] * cells
        self._expected = [0.0] * cells
        self._prior_scale = prior_scale
        self._strength = strength
        self._decay = decay

    def rate(self, share: float, depth: int) -> float:
        """Probability in [0, 1] that a node with this vote share is accepted, given that its parent is."""
        cell = _share_cell(share, depth)
        strength = self._strength
        rate = share * (self._accepted[cell] + strength * self._prior_scale) / (self._expected[cell] + strength)
        return rate if rate < 1.0 else 1.0

    def fixed(self) -> FixedAcceptance:
        """What it knows of each bucket now."""
        strength, scale = self._strength, self._prior_scale
        cells = zip(self._accepted, self._expected, strict=True)
        return FixedAcceptance(
            tuple([(accepted + strength * scale) / (expected + strength) for accepted, expected in cells])
        )

    def record(self, share: float, depth: int, accepted: bool) -> None:
        """Count one node whose parent was on the committed path."""
        cell = _share_cell(share, depth)
        self._accepted[cell] = self._accepted[cell] * self._decay + accepted
        self._expected[cell] = self._expected[cell] * self._decay + share


class FixedAcceptance:
    """A `ShareAcceptance` at one moment: accepted over expected of each bucket."""

    __slots__ = ("ratios",)

    def __init__(self, ratios: tuple[float, ...]) -> None:
        self.ratios = ratios

    def rate(self, share: float, depth: int) -> float:
        """As `ShareAcceptance.rate`."""
        rate = share * self.ratios[_share_cell(share, depth)]
        return rate if rate < 1.0 else 1.0


class OwnAcceptance:
    """The acceptance of one request: what its pool knows of shares, times how much more or less of that this request
    accepts.

    The factor is accepted over expected tokens of its own rounds, fading by `decay` with each depth that was reached
    towards 1, which is worth `strength` expected tokens. One request copies where another writes freely, and neither
    the shares nor the drafters' confidences need to tell.
    """

    __slots__ = ("_accepted", "_decay", "_expected", "_pool", "_strength")

    def __init__(self, pool: ShareAcceptance, strength: float = 24.0, decay: float = 0.99) -> None:
        if strength <= 0 or not 0 < decay <= 1:
            raise ValueError("strength must be positive, decay in (0, 1]")
        self._pool = pool
        self._strength = strength
        self._decay = decay
        self._accepted = self._expected = 0.0

    @property
    def factor(self) -> float:
        return (self._accepted + self._strength) / (self._expected + self._strength)

    def rate(self, share: float, depth: int) -> float:
        """Probability as of `ShareAcceptance.rate`, for this request."""
        rate = self._pool.rate(share, depth) * self.factor
        return rate if rate < 1.0 else 1.0

    def record(self, shares: Iterable[float], depth: int, accepted: bool) -> None:
        """The tokens proposed after the committed ones, with these shares; `accepted`: one of them was right."""
        expected = sum([self._pool.rate(share, depth) for share in shares])
        self._accepted = self._accepted * self._decay + accepted
        self._expected = self._expected * self._decay + (expected if expected < 1.0 else 1.0)


def _share_cell(share: float, depth: int) -> int:
    index = int(share * NUM_SHARE_BINS)
    if index >= NUM_SHARE_BINS:
        index = NUM_SHARE_BINS - 1
    return index * NUM_SHARE_DEPTHS + (depth if depth < NUM_SHARE_DEPTHS else NUM_SHARE_DEPTHS - 1)
