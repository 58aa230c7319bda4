"""Replaying a recording under given policies, and bounds that no policy can pass.

What a replay comes to: acceptance over all, by category and by depth, votes won, and the clock's seconds. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab.replay.folder import Recording
from lab.replay.proposals import shortened
from lab.replay.recorded_texts import TargetText
from lab.replay.replayed_rounds import Clock, Played, Said, Setting, Waits, play
from moot.core.errors import ConfigError
from moot.core.options import option, option_of
from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.drafter_selection import ALL
from moot.core.speculation.policy import PoolPolicy, SpeculationOptions, make_policy
from moot.core.types import Proposal
from moot.drafters.registry import attached_kinds


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
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
    skipped: Mapping[str, int] = field(default_factory=dict)
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


def outcome_of(played: Iterable[Played]) -> ReplayOutcome:
    tokens = rounds = drafted = 0
    seconds = drafting = 0.0
    positions: list[int] = []
    won: Counter[str] = Counter()
    proposed: Counter[str] = Counter()
    would: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    skipped: Counter[str] = Counter()
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
        skipped.update(one.skipped)
    return ReplayOutcome(
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
        dict(skipped),
    )


def by_group(played: Sequence[Played]) -> dict[str, ReplayOutcome]:
    """Per category, as tables call them, in the order of their names."""
    groups = sorted({one.text.group for one in played})
    return {group: outcome_of(one for one in played if one.text.group == group) for group in groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies(SpeculationOptions):
    """What a router is started with, by the same names. `drafter_ids`: who votes; none: all that were recorded."""

    vote: str = option_of(SpeculationOptions, "vote", help="how the proposals become one path (or --policy)")
    length: str = option_of(SpeculationOptions, "length", default="fixed")
    asks: str = ALL
    num_speculative_tokens: int = option_of(SpeculationOptions, "num_speculative_tokens", help="greatest K (or -k)")
    width: int = option_of(CollectionPolicy, "width", help="proposals that one drafter may make")
    drafter_ids: tuple[str, ...] = option(
        (), flag="drafters", help="ids of those that vote (none: all that were recorded)"
    )
    clock: Clock = field(default_factory=Clock)

    def with_only(self, drafter_id: str) -> Policies:
        """That drafter alone, its proposals verified whole."""
        return replace(self, vote="best", shape="chain", weights="uniform", drafter_ids=(drafter_id,))


class Replay:
    """One recording, to be replayed as often as is wished. Nothing that one run learns reaches the next."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.drafter_ids = tuple(sorted(recording.records))
        # Asked once: it reads what is installed.
        attached = attached_kinds()
        self._said = [
            {
                id_: Said(record.of_text(index), record.seconds_of(index), record.facts.kind in attached)
                for id_, record in recording.records.items()
            }
            for index in range(len(recording.texts))
        ]

    def run(self, policies: Policies, pool: PoolPolicy | None = None) -> list[Played]:
        """The texts in their order, one request after the other. `pool`: what to go on with; None: a router that has
        just been started. Raises ConfigError for names that there are not, and for more than was recorded."""
        chosen = self._chosen(policies)
        if pool is None:
            pool = make_policy(policies)
            for id_ in chosen:
                pool.admit(id_, self.recording.records[id_].facts.family)
        setting = Setting(
            context_limit=self.recording.meta.context_limit,
            vocab_size=self.recording.meta.vocab_size,
            width=policies.width,
            clock=policies.clock,
        )
        waits = Waits()
        texts = zip(self.recording.texts, self._said, strict=True)
        return [play(text, {id_: said[id_] for id_ in chosen}, pool, setting, waits) for text, said in texts]

    def alone(self, policies: Policies) -> dict[str, list[Played]]:
        """Each drafter by itself."""
        return {id_: self.run(policies.with_only(id_)) for id_ in self._chosen(policies)}

    def bound(self, policies: Policies, *, coherent: bool) -> list[tuple[TargetText, int, int]]:
        """Per text the rounds, and the tokens accepted in them, of a vote that always knows.

        `coherent`: it verifies the best whole proposal (or, the same, all of them). Else it goes on while any drafter
        is right at that depth, whatever that drafter said before: what no vote on tokens of these proposals can pass.
        """
        chosen, length = self._chosen(policies), policies.num_speculative_tokens
        found: list[tuple[TargetText, int, int]] = []
        for text, said in zip(self.recording.texts, self._said, strict=True):
            rounds = accepted = 0
            done, output = 1, text.output_token_ids
            while done < len(output):
                room = min(length, text.max_tokens - done - 1)
                heads = [
                    head for id_ in chosen for head in shortened(said[id_].proposals[done - 1], room, policies.width)
                ]
                right = _depth_reached(heads, output[done:], coherent) if room > 0 else 0
                rounds, accepted, done = rounds + 1, accepted + right, done + right + 1
            found.append((text, rounds, accepted))
        return found

    def _chosen(self, policies: Policies) -> Sequence[str]:
        chosen = policies.drafter_ids or self.drafter_ids
        if unknown := sorted(set(chosen) - set(self.drafter_ids)):
            raise ConfigError(f"no drafter {', '.join(unknown)} here; there is {', '.join(self.drafter_ids)}")
        for id_ in chosen:
            facts = self.recording.records[id_].facts
            if policies.num_speculative_tokens > facts.num_speculative_tokens or policies.width > facts.width:
                raise ConfigError(
                    f"drafter {id_} was asked for {facts.width} proposals of {facts.num_speculative_tokens} tokens: "
                    "no more can be replayed"
                )
        return chosen


def _depth_reached(heads: Sequence[Proposal], rest: Sequence[int], coherent: bool) -> int:
    """Leading tokens of `rest` that some head has right (coherent: one and the same head)."""
    alive = list(heads)
    for depth, token in enumerate(rest):
        right = [head for head in alive if depth < len(head.token_ids) and head.token_ids[depth] == token]
        if not right:
            return depth
        if coherent:
            alive = right
    return len(rest)
