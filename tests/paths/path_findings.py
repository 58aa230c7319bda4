"""Many cases played, and all that came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.paths.path_coverage import count, watch
from tests.paths.path_peers import House
from tests.paths.path_play import Played, play_all


@dataclass
class Findings:
    played: list[Played] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, played: Played) -> None:
        self.played.append(played)
        count(played, self.seen)


async def play_cases(folder: Path, numbers: Sequence[int]) -> Findings:
    """`folder`: where models and tables lie, or are made."""
    findings = Findings()
    house = House(folder, lambda engine: watch(engine, findings.seen))
    try:
        await play_all(house, numbers, findings.note)
    finally:
        await house.close()
    return findings
