"""Every drafter by itself: acceptance per category at K = 4 and 8, time per proposal, bytes, from one recording.

    python -m bench.replay_kinds --recording DIR [--lengths 4,8]

DIR: of `moot replay record`. Times are those of the recording, on the machine and under the load that it was made.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.report import publish
from lab.replay.evaluate import Policies, Replay, by_group, outcome_of
from lab.replay.folder import open_recording
from lab.replay.proposals import ProposalRecord
from moot.config import load_config, option


@dataclass(frozen=True, kw_only=True)
class KindsConfig:
    recording: Path = option(help="folder of a recording")
    drafters: tuple[str, ...] = option((), help="ids of those that are shown (none: all that were recorded)")
    lengths: tuple[int, ...] = option((4, 8), help="values of K")


def times(record: ProposalRecord) -> tuple[float, float]:
    """Median microseconds of being told a committed id, and of a proposal."""
    return 1e6 * statistics.median(record.told_s), 1e6 * statistics.median(record.asked_s)


def main() -> int:
    config = load_config(KindsConfig, sys.argv[1:], prog="python -m bench.replay_kinds", description=__doc__ or "")
    replay = Replay(open_recording(config.recording, config.drafters))
    groups = sorted({text.group for text in replay.recording.texts})
    rows: list[list[str]] = []
    facts: dict[str, Any] = {
        "texts": dict(Counter(text.group for text in replay.recording.texts)),
        "model": replay.recording.meta.model,
        "origin": replay.recording.meta.origin,
        "drafters": {},
    }
    lengths: dict[int, dict[str, float]] = {length: {} for length in config.lengths}
    for id_, record in replay.recording.records.items():
        told, asked = times(record)
        facts["drafters"][id_] = {
            "kind": record.facts.kind,
            "options": {name: Path(value).name for name, value in record.facts.options.items()},
            "told_us": told,
            "asked_us": asked,
            "bytes": record.facts.num_bytes,
            "acceptance": {},
        }
        for length in config.lengths:
            played = replay.run(Policies(num_speculative_tokens=length).with_only(id_))
            found = {group: outcome.mean_acceptance_length for group, outcome in by_group(played).items()}
            whole = lengths[length][id_] = outcome_of(played).mean_acceptance_length
            facts["drafters"][id_]["acceptance"][length] = found | {"all": whole}
            cells = [f"{found[group]:.2f}" for group in groups]
            last = length == config.lengths[-1]
            cost = [f"{told:.0f} + {asked:.0f}", f"{record.facts.num_bytes:,}"] if last else ["", ""]
            rows.append([id_, str(length), *cells, f"{whole:.3f}", *cost])

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = list(replay.recording.records)
        for place, (length, found) in enumerate(lengths.items()):
            shifted = [number + 0.4 * place for number in range(len(names))]
            axes.bar(shifted, [found[name] - 1 for name in names], 0.38, bottom=1, label=f"K = {length}")
        axes.set_xticks([number + 0.2 * (len(lengths) - 1) for number in range(len(names))], names)
        axes.set(ylabel="mean acceptance length, alone")
        axes.legend()

    publish("replay_kinds", ("drafter", "K", *groups, "all", "us: told + asked", "bytes"), rows, facts, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
