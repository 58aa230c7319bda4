"""The vote policy that a router sends to its verifiers: all that a vote reads, at one moment, under a number.

The router learns and decides; where a step is planned the same vote is held over the proposals that are there then, by
the rates that the router knew. It holds no text of any user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moot.core.types import Proposal
from moot.core.voting.calibration import DrafterTable, FixedAcceptance, FixedRates
from moot.core.voting.voting import VoteResult, vote

_UNKNOWN = DrafterTable().fixed()


@dataclass(frozen=True, slots=True)
class VotePolicy:
    """A vote policy. `rates`: per drafter."""

    number: int
    vote: str
    shape: str
    num_speculative_tokens: int
    """Depth of a draft at the most."""
    max_draft_tokens: int
    weights: Mapping[str, float]
    families: Mapping[str, str]
    rates: Mapping[str, FixedRates]
    acceptance: FixedAcceptance

    def of(self, drafter_id: str) -> FixedRates:
        """The rates of a drafter; of one that the policy does not know, those that all start with."""
        return self.rates.get(drafter_id, _UNKNOWN)

    def apply(self, proposals: Sequence[Proposal]) -> VoteResult:
        """The vote over these proposals, all for the same prefix."""
        return vote(
            proposals,
            self.weights,
            policy=self.vote,
            shape=self.shape,
            num_speculative_tokens=self.num_speculative_tokens,
            max_draft_tokens=self.max_draft_tokens,
            calibration=self,
            families=self.families,
            acceptance=self.acceptance,
        )
