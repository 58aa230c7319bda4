"""What a replay comes to: acceptance over all, by category and by depth, votes won, and the clock's seconds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moot.replay.rounds import Played


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of some texts. `accepted_per_position[j]`: rounds whose j-th draft token (from 0) was accepted."""

    num_tokens: int
    num_rounds: int
    num_drafted: int
    accepted_per_position: tuple[int, ...]
    votes_won: Mapping[str, int]
    proposed: Mapping[str, int]
    would_accept: Mapping[str, int]
    """Per drafter, leading tokens of its own proposals that the target then said, won or not."""
    lengths: Mapping[int, int]
    seconds: float
    draft_seconds: float = 0.0
    spared: Mapping[str, int] = field(default_factory=dict)
    """Per drafter, rounds in which a cascade did not ask it."""

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the next token included; 1 where there was no round."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0

    @property
    def drafted_per_round(self) -> float:
        return self.num_drafted / self.num_rounds if self.num_rounds else 0.0

    @property
    def mean_length(self) -> float:
        """Mean K of its rounds."""
        return sum(length * count for length, count in self.lengths.items()) / max(self.num_rounds, 1)

    @property
    def tokens_per_s(self) -> float:
        """After the first token of each text, by the clock."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def outcome_of(played: Iterable[Played]) -> Outcome:
    tokens = rounds = drafted = 0
    seconds = drafting = 0.0
    positions: list[int] = []
    won: Counter[str] = Counter()
    proposed: Counter[str] = Counter()
    would: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    spared: Counter[str] = Counter()
    for one in played:
        generation = one.generation
        tokens += max(len(generation.output_token_ids) - 1, 0)
        rounds += generation.num_rounds
        drafted += generation.num_draft_tokens
        seconds += one.seconds
        accepted = generation.num_accepted_tokens_per_position
        positions.extend([0] * (len(accepted) - len(positions)))
        for depth, count in enumerate(accepted):
            positions[depth] += count
        for drafter_id, counted in generation.drafters.items():
            won[drafter_id] += counted.num_votes_won
            proposed[drafter_id] += counted.num_proposed_tokens
            would[drafter_id] += counted.num_accepted_tokens
        lengths.update(one.lengths)
        drafting += one.draft_seconds
        spared.update(one.spared)
    return Outcome(
        tokens,
        rounds,
        drafted,
        tuple(positions),
        dict(won),
        dict(proposed),
        dict(would),
        dict(lengths),
        seconds,
        drafting,
        dict(spared),
    )


def by_group(played: Sequence[Played]) -> dict[str, Outcome]:
    """Per category, as tables call them, in the order of their names."""
    groups = sorted({one.text.group for one in played})
    return {group: outcome_of(one for one in played if one.text.group == group) for group in groups}
