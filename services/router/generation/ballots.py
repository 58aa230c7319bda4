"""How long a round waits for its proposals, and how many a drafter may make."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BallotPolicy:
    """How long a round waits for proposals. Seconds, from the moment the drafters are asked."""

    soft_deadline_s: float = 0.05
    hard_deadline_s: float = 0.25
    quorum: float = 0.5
    """Share of the drafters asked that suffices once the soft deadline has passed, 0 to 1."""
    width: int = 1
    """Proposals that a drafter may make at most."""
    num_top_candidates: int = 8
    """Asked of the verifier where a drafter of the request lives from them."""
