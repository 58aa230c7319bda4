"""How much of what a drafter proposes is right, on rows that nothing was learned from.

Rounds as they happen: from a known prefix a chain is proposed, its leading right tokens and one more are committed.
For a chain it is enough to know, for each position, how many leading tokens would be right there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moot.training.script import GREEDY, SAMPLED

LENGTHS = (4, 8)
LONGEST = max(LENGTHS)
MOST_MEASURED = 24_000
"""Held-out positions that acceptance is reported on, at most."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A row with its `right` [positions]: how many tokens of a chain proposed after position p are the ones that
    follow, at most LONGEST."""

    roles: NDArray[np.uint8]
    right: NDArray[np.int64]


def runs(roles: NDArray[np.uint8], role: int) -> Iterator[tuple[int, int]]:
    """First position and end of each stretch of `role`, those at the row's begin left out: nothing is known before."""
    inside = np.concatenate(([False], roles == role, [False]))
    borders = np.flatnonzero(inside[1:] != inside[:-1])
    for first, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
        if first >= 2:
            yield first, end


def report(streams: Sequence[Stream]) -> dict[str, float]:
    """`tokens`, `agreement_1`..`agreement_4` (given that the tokens before it were right) and `length_4`, `length_8`
    (mean acceptance length, next token included) of greedy answers, and the same of sampled ones with `sampled_`."""
    result: dict[str, float] = {}
    for role, prefix in ((GREEDY, ""), (SAMPLED, "sampled_")):
        stretches = [(stream, first, end) for stream in streams for first, end in runs(stream.roles, role)]
        result[f"{prefix}tokens"] = sum(end - first for _, first, end in stretches)
        for depth in range(1, 5):
            reached = hit = 0
            for stream, first, end in stretches:
                right = stream.right[first - 1 : end - depth]
                reached += int((right >= depth - 1).sum())
                hit += int((right >= depth).sum())
            result[f"{prefix}agreement_{depth}"] = round(hit / reached, 4) if reached else 0.0
        for length in LENGTHS:
            rounds = sum(_rounds(stream.right, first, end, length) for stream, first, end in stretches)
            result[f"{prefix}length_{length}"] = round(result[f"{prefix}tokens"] / rounds, 4) if rounds else 0.0
    return result


def _rounds(right: NDArray[np.int64], first: int, end: int, length: int) -> int:
    position, rounds = first - 1, 0
    while position < end - 1:
        position += min(int(right[position]), length) + 1
        rounds += 1
    return rounds


def leading(matches: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Leading true values along the last axis."""
    counted: NDArray[np.int64] = np.cumprod(matches.astype(np.int64), -1).sum(-1)
    return counted


def from_single(matches: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`right` [positions] of a drafter that reads the text alone, from whether the one token it would propose after
    each position is right: it guesses the next one as if it had been given the right ones before."""
    padded = np.concatenate((matches, np.zeros(LONGEST, np.bool_)))
    return leading(np.lib.stride_tricks.sliding_window_view(padded, LONGEST)[: len(matches)])
