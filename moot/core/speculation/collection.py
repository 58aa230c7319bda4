"""The collection of a round's proposals: how long a round waits for them, and how many a drafter may make."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.errors import ConfigError
from moot.core.options import Options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPolicy(Options):
    """The options of collection. Milliseconds count from the moment the drafters are asked."""

    width: int = option(
        1, flag="proposal_width", help="most proposals that one drafter may make for a round", minimum=1
    )
    num_top_candidates: int = option(
        8, help="likely ids per token that the verifier reports for drafters that use them (recycling)", minimum=0
    )
    soft_deadline_ms: float = option(
        50.0,
        flag="vote_soft_deadline_ms",
        help="milliseconds after which a round goes on once a quorum of its drafters has answered",
        minimum=0,
    )
    hard_deadline_ms: float = option(
        250.0,
        flag="vote_hard_deadline_ms",
        help="milliseconds after which a round goes on with the proposals that have come",
        above=0,
    )
    quorum: float = option(
        0.5,
        flag="vote_quorum",
        help="share of the drafters asked that must have answered after the soft deadline, 0 to 1",
        minimum=0,
        maximum=1,
    )

    def check_together(self) -> None:
        if self.soft_deadline_ms > self.hard_deadline_ms:
            raise ConfigError("vote_soft_deadline_ms must not be above vote_hard_deadline_ms")

    @property
    def soft_deadline_s(self) -> float:
        return self.soft_deadline_ms / 1000

    @property
    def hard_deadline_s(self) -> float:
        return self.hard_deadline_ms / 1000
