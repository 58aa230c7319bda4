"""Replaying a recording under given policies, and bounds that no policy can pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moot.core.cascade import ALWAYS_ASK
from moot.core.errors import ConfigError
from moot.core.panel import ALL
from moot.core.policy import PoolPolicy, make_policy
from moot.core.types import Proposal
from moot.proposers.entries import INSIDE_KINDS
from moot.replay.folder import Recording
from moot.replay.proposals import shortened
from moot.replay.rounds import Clock, Played, Said, Setting, Waits, play
from moot.replay.texts import TargetText


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What a router is started with, by the same names. `drafter_ids`: who votes; none: all that were recorded."""

    vote: str = "calibrated"
    shape: str = "tree"
    weights: str = "hedge"
    length: str = "fixed"
    asks: str = ALL
    cascade: float = ALWAYS_ASK
    num_speculative_tokens: int = 8
    max_draft_tokens: int = 16
    width: int = 1
    drafter_ids: tuple[str, ...] = ()
    clock: Clock = field(default_factory=Clock)

    def with_only(self, drafter_id: str) -> Policies:
        """That drafter alone, its proposals verified whole."""
        return replace(self, vote="best", shape="chain", weights="uniform", drafter_ids=(drafter_id,))


class Replay:
    """One recording, to be replayed as often as is wished. Nothing that one run learns reaches the next."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.drafter_ids = tuple(sorted(recording.records))
        self._said = [
            {
                id_: Said(record.of_text(index), record.seconds_of(index), record.facts.kind in INSIDE_KINDS)
                for id_, record in recording.records.items()
            }
            for index in range(len(recording.texts))
        ]

    def run(self, policies: Policies, pool: PoolPolicy | None = None) -> list[Played]:
        """The texts in their order, one request after the other. `pool`: what to go on with; None: a router that has
        just been started. Raises ConfigError for names that there are not, and for more than was recorded."""
        chosen = self._chosen(policies)
        if pool is None:
            pool = make_policy(
                vote=policies.vote,
                shape=policies.shape,
                weights=policies.weights,
                length=policies.length,
                asks=policies.asks,
                cascade=policies.cascade,
                num_speculative_tokens=policies.num_speculative_tokens,
                max_draft_tokens=policies.max_draft_tokens,
            )
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
