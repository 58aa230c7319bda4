"""Every drafter by itself: acceptance per category at K = 4 and 8, time per proposal, bytes, from one recording.

    python -m lab.bench.replay_kinds --recording DIR [--lengths 4,8]

DIR: of `moot replay record`. Times are those of the recording, on the machine and under the load that it was made.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.harness.pages import Bench, Table
from lab.bench.replays.report import RecordingConfig, facts_of
from lab.replay.evaluate import Policies, Replay, by_group, outcome_of
from lab.replay.folder import open_recording
from moot.config import option

BENCH = Bench("replay_kinds", __doc__, measures=("moot/core", "moot/drafters", "lab/replay"))


@dataclass(frozen=True, kw_only=True)
class Config(RecordingConfig):
    lengths: tuple[int, ...] = option((4, 8), help="values of K")


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    replay = Replay(open_recording(config.recording, config.drafters))
    groups = sorted({text.group for text in replay.recording.texts})
    rows: list[list[str]] = []
    alone: dict[str, dict[int, float]] = {}
    costs: dict[str, dict[str, float]] = {}
    for id_, record in replay.recording.records.items():
        told, asked = (1e6 * statistics.median(times) for times in (record.told_s, record.asked_s))
        costs[id_] = {"told_us": told, "asked_us": asked, "bytes": record.facts.num_bytes}
        for length in config.lengths:
            played = replay.run(Policies(num_speculative_tokens=length).with_only(id_))
            found = {group: outcome.mean_acceptance_length for group, outcome in by_group(played).items()}
            whole = alone.setdefault(id_, {})[length] = outcome_of(played).mean_acceptance_length
            is_last = length == config.lengths[-1]
            cost = [f"{told:.0f} + {asked:.0f}", f"{record.facts.num_bytes:,}"] if is_last else ["", ""]
            rows.append([id_, str(length), *(f"{found[group]:.2f}" for group in groups), f"{whole:.3f}", *cost])
    header = ("drafter", "K", *groups, "all", "us: told + asked", "bytes")
    facts = facts_of(replay.recording) | {"alone": alone, "costs": costs}
    BENCH.publish(config, Table(header, rows, labels=2), facts, "all", argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
