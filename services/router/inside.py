"""Drafters inside the verifier, as the electorate sees them: asked with every command, answered with every answer.

What they propose for a round has come with the answer before it, so asking them costs no time and no message. A wish is
a round ahead of its plan: it asks for as many tokens as the round under way was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moot.core.types import Proposal, Verification
from moot.metrics import Metrics
from services.router.ports import BallotBox, Prefix


@dataclass(slots=True)
class Inside:
    """One request's dealings with them, on its prefix: whoever opens or verifies tells what is wished."""

    drafter_ids: tuple[str, ...]
    width: int
    num_tokens: int
    """Wished for the round after the next answer; 0: none."""
    base_length: int = -1
    """What the proposals below follow."""
    proposals: tuple[Proposal, ...] = field(default=())

    def hear(self, verification: Verification) -> None:
        self.base_length = verification.base_length + len(verification.output_token_ids)
        self.proposals = verification.proposals


class InsideDrafter:
    """The `Drafter` port of one request: it has been asked already, and casts what came."""

    __slots__ = ("_metrics", "_prefix", "drafter_id")

    def __init__(self, drafter_id: str, prefix: Prefix, metrics: Metrics) -> None:
        self.drafter_id = drafter_id
        self._prefix = prefix
        self._metrics = metrics

    def prepare(self) -> None:
        """Its verifier reads the prompt."""

    def ask(self, box: BallotBox, num_speculative_tokens: int, width: int) -> bool:
        inside = self._prefix.inside
        # After a move, or from a verifier without it, there is nothing for this place.
        if inside is None or inside.base_length != len(self._prefix):
            return False
        own = tuple(_cut(one, num_speculative_tokens) for one in inside.proposals if one.drafter_id == self.drafter_id)
        if not own:
            return False
        box.expect(self)
        box.cast(self, own)
        return True

    @property
    def answer_seconds(self) -> float:
        return 0.0

    def missed(self) -> None:
        """Cannot be: it answers at once."""

    def answered(self) -> None:
        """As always."""

    def malformed(self, reason: str) -> None:
        self._metrics.proposals_dropped.labels(self.drafter_id, reason).inc()

    def end(self, *, aborted: bool) -> None:
        """The verifier's session ends with the request."""


@dataclass(frozen=True, slots=True)
class InsideSource:
    """One drafter that verifiers have said they hold. Same interface as a pool of replicas."""

    drafter_id: str
    metrics: Metrics
    wants_top_candidates: bool = False

    def serves(self, prefix: Prefix) -> bool:
        return True

    def drafter(self, prefix: Prefix) -> InsideDrafter:
        return InsideDrafter(self.drafter_id, prefix, self.metrics)


def _cut(proposal: Proposal, length: int) -> Proposal:
    """It was made before K was known."""
    if len(proposal.token_ids) <= length:
        return proposal
    return Proposal(proposal.drafter_id, proposal.token_ids[:length], proposal.confidences[:length])
