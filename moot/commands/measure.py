"""The comparison of drafting on and off. Pure: samples in, numbers and tables out.

Speed counts decoding only: tokens after the first piece of the stream over the time from that piece to the last one.
Medians over the repetitions, with the lowest and highest beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moot.client import StreamedAnswer


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. `num_timed_tokens` came in `decode_s` seconds, after the first piece."""

    prompt: str
    drafting: bool
    token_ids: tuple[int, ...]
    text: str
    num_timed_tokens: int
    decode_s: float
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafters: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: str, drafting: bool, answer: StreamedAnswer) -> Sample:
        """Raises ValueError for an answer without tokens."""
        if not answer.pieces:
            raise ValueError("the answer is empty")
        first, last = answer.pieces[0], answer.pieces[-1]
        speculative = answer.metrics["speculative_decoding"]
        return cls(
            prompt,
            drafting,
            tuple(answer.token_ids),
            answer.text,
            len(answer.token_ids) - len(first.token_ids),
            last.at - first.at,
            speculative["num_drafts"],
            speculative["num_draft_tokens"],
            speculative["num_accepted_tokens"],
            speculative["drafters"],
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding; 0 when nothing came after the first piece."""
        return self.num_timed_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples with and without drafting, of one prompt or of all."""

    on: tuple[Sample, ...]
    off: tuple[Sample, ...]

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Comparison:
        samples = tuple(samples)
        return cls(
            tuple(sample for sample in samples if sample.drafting),
            tuple(sample for sample in samples if not sample.drafting),
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(sample.prompt for sample in (*self.off, *self.on)))

    def only(self, prompt: str) -> Comparison:
        return Comparison.of(sample for sample in (*self.on, *self.off) if sample.prompt == prompt)

    @property
    def identical(self) -> bool:
        """Whether every prompt has one answer, id by id, in all its samples."""
        return all(self.first_difference(prompt) is None for prompt in self.prompts)

    def first_difference(self, prompt: str) -> int | None:
        """First output position at which two answers to `prompt` part; None: they are the same."""
        samples = [sample for sample in (*self.off, *self.on) if sample.prompt == prompt]
        reference = samples[0].token_ids
        ends = [_parting(reference, sample.token_ids) for sample in samples[1:]]
        return min((end for end in ends if end is not None), default=None)

    @property
    def speeds(self) -> tuple[Spread, Spread]:
        """Tokens per second off and on, per repetition over all prompts of that repetition."""
        return self._spread(self.off), self._spread(self.on)

    @property
    def speed_up(self) -> float:
        off, on = self.speeds
        return on.median / off.median if off.median else 0.0

    @property
    def acceptance_rate(self) -> float:
        drafted = sum(sample.num_draft_tokens for sample in self.on)
        return sum(sample.num_accepted_tokens for sample in self.on) / drafted if drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the target's own included."""
        rounds = sum(sample.num_rounds for sample in self.on)
        return 1 + sum(sample.num_accepted_tokens for sample in self.on) / rounds if rounds else 1.0

    def row(self, name: str) -> list[str]:
        off, on = self.speeds
        lengths = {len(sample.token_ids) for sample in self.on}
        return [
            name,
            f"{max(lengths)}" if len(self.prompts) == 1 else "",
            str(off),
            str(on),
            f"{self.speed_up:.2f}",
            f"{self.acceptance_rate:.0%}",
            f"{self.mean_acceptance_length:.2f}",
            "yes" if self.identical else "NO",
        ]

    def drafter_rows(self) -> list[list[str]]:
        """Name, proposed, accepted and won of each drafter, summed over the samples with drafting."""
        names = ("num_proposed_tokens", "num_accepted_tokens", "num_votes_won")
        drafters = sorted({drafter for sample in self.on for drafter in sample.drafters})
        return [
            [
                drafter,
                *(str(sum(sample.drafters.get(drafter, {}).get(name, 0) for sample in self.on)) for name in names),
            ]
            for drafter in drafters
        ]

    @staticmethod
    def _spread(samples: Sequence[Sample]) -> Spread:
        by_prompt: dict[str, list[Sample]] = {}
        for sample in samples:
            by_prompt.setdefault(sample.prompt, []).append(sample)
        repetitions = zip(*by_prompt.values(), strict=True)
        return Spread.of(
            [
                sum(sample.num_timed_tokens for sample in one) / max(sum(sample.decode_s for sample in one), 1e-9)
                for one in repetitions
            ]
        )


COMPARISON_HEADER = (
    "prompt", "tokens", "tokens/s off", "tokens/s on", "speed-up", "accepted", "tokens/round", "identical",
)  # fmt: skip
DRAFTER_HEADER = ("drafter", "proposed", "accepted", "votes won")


def _parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
