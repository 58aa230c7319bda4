"""Costs and calibrations that have seen something: where tests of lengths, votes and bundles begin."""

from __future__ import annotations

from typing import TypeVar

from moot.core.speculation.costs import DraftCost, VerifyCost
from moot.core.voting.calibration import Calibration

Cost = TypeVar("Cost", VerifyCost, DraftCost)


def seen(cost: Cost, seconds_of: dict[int, float], times: int = 20) -> Cost:
    """`cost` after so many samples of each size in turn; steps of so many tokens, or drafts of that length."""
    for _ in range(times):
        for size, seconds in seconds_of.items():
            cost.observe(size, seconds)
    return cost


def trained(
    rates: dict[str, float], confidence: int = 0, depths: int = 3, calibration: Calibration | None = None
) -> Calibration:
    """A calibration, or the given one, in which each drafter was right at that rate."""
    calibration = calibration or Calibration()
    for id_, rate in rates.items():
        for i in range(400):
            for depth in range(depths):
                calibration.of(id_).record(confidence, depth, (i * 37 % 100) < rate * 100)
    return calibration
