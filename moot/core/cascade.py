"""When dear drafters need not be asked: the cheap ones have answered, and one of them is sure.

A proposal's worth is the tokens that it is expected to bring, by its drafter's own hit rates, as a part of the K
tokens that were asked for: a short proposal leaves room for others, however sure it is. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from moot.core.calibration import Calibration
from moot.core.types import Proposal

ALWAYS_ASK = 1.0
"""The threshold that no expectation reaches."""
_DEAR = 0.02
"""Part of a round from which waiting for a drafter is dear."""


def expected_share(proposals: Iterable[Proposal], calibration: Calibration, num_tokens: int) -> float:
    """The greatest expected number of accepted tokens of one proposal over K = `num_tokens`, in [0, 1)."""
    best = 0.0
    for proposal in proposals:
        table = calibration.of(proposal.drafter_id)
        chance = 1.0
        expected = 0.0
        confidences = proposal.confidences or (0,) * len(proposal.token_ids)
        for depth, confidence in enumerate(confidences[:num_tokens]):
            chance *= table.rate(confidence, depth)
            expected += chance
        best = max(best, expected / num_tokens)
    return best


def is_dear(answer_seconds: float | None, round_seconds: float | None) -> bool:
    """Whether a drafter's answers take a part of a round that is worth being spared. None: not known; it is asked."""
    return answer_seconds is not None and round_seconds is not None and answer_seconds > _DEAR * round_seconds
