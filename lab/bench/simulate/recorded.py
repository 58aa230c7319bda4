"""Recorded texts for the simulation: the target's own tokens, and the real model-free drafters on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moot.core.types import Proposal, SamplingParams
from moot.drafters import registry
from moot.drafters.interface import Ask
from moot.simulation.simulated_texts import SimulatedText


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer of the target: prompt and output ids, and for each output token the ids that were most likely there.

    `num_cached`: prompt tokens that the verifier's prefix cache holds."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    top_candidates: tuple[tuple[int, ...], ...]
    num_cached: int = 0


class RecordedTexts:
    """The recordings one after the other, from the first again after the last. `kinds`: of the drafters, in order."""

    def __init__(self, recordings: Sequence[Recording], kinds: Sequence[str], vocab_size: int) -> None:
        self._recordings = recordings
        self._drafters = [registry.create(kind, {"vocab_size": vocab_size}) for kind in kinds]
        self._next = 0

    def replace(self, recordings: Sequence[Recording]) -> None:
        """Other recordings, from their first on; what the drafters have learned stays."""
        self._recordings, self._next = recordings, 0

    def next(self) -> SimulatedText:
        recording = self._recordings[self._next % len(self._recordings)]
        self._next += 1
        return _RecordedText(recording, self._drafters)


class _RecordedText:
    def __init__(self, recording: Recording, drafters: Sequence[Any]) -> None:
        self._recording = recording
        self._drafters = drafters
        self._params = SamplingParams(temperature=0.0, max_tokens=len(recording.output_token_ids))
        self._sessions: dict[int, Any] = {}
        self._known: dict[int, int] = {}
        self.prompt_token_ids = recording.prompt_token_ids
        self.num_output = len(recording.output_token_ids)
        self.num_cached_tokens = recording.num_cached

    def token(self, position: int) -> int:
        return self._recording.output_token_ids[position]

    def propose(self, drafter: int, position: int, length: int, head: Proposal) -> Proposal:
        held = self._drafters[drafter]
        if drafter not in self._sessions:
            self._sessions[drafter] = held.open(self.prompt_token_ids, self._params)
        session, known = self._sessions[drafter], self._known.get(drafter, 0)
        if position > known:
            recording = self._recording
            held.extend(session, recording.output_token_ids[known:position], recording.top_candidates[known:position])
            self._known[drafter] = position
        chains = held.propose([Ask(session, length)])[0]
        return chains[0] if chains else Proposal(())
