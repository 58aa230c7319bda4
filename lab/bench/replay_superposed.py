"""Superposed drafting beside the draft model that it runs: alone, all its proposals verified, and in a vote.

    python -m bench.replay_superposed --recordings DIR,DIR --drafters a,b,c --electorates x+y,x+y+z --added a,b

DIR: of `moot replay record`, one for each K that is shown, since sequences that were drafted to a depth are not the
heads of those drafted deeper. Superposed drafters are shown with their first proposal alone, with as many as they have
sequences, and with all that were recorded; others with the latter. `electorates`, of the last recording: who votes
without, and then with, each of those added. Exact, but for the times, which are those of the recording.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contrib.superposed.superposed import SuperposedOptions, SuperposedProposer
from lab.bench.replay_votes import Counts, bound_of, compared, counts_of, over_texts
from lab.bench.report import publish
from lab.replay.evaluate import Policies, Replay
from lab.replay.folder import open_recording
from lab.replay.proposals import ProposalRecord, shortened
from moot.config import load_config, option
from moot.core.errors import ConfigError
from moot.core.voting.tree import Ballot

HEADER = ("drafter", "K", "proposals", "all verified, 95 % over texts", "draft tokens", "ms")


@dataclass(frozen=True, kw_only=True)
class SuperposedConfig:
    recordings: tuple[Path, ...] = option(help="folders of recordings, the least K first")
    drafters: tuple[str, ...] = option(help="ids of those that are shown alone")
    electorates: tuple[str, ...] = option((), help="ids of who votes, joined by +")
    added: tuple[str, ...] = option((), help="ids of who is added to each electorate")
    width: int = option(4, help="proposals that each drafter makes in a vote")
    budgets: tuple[int, ...] = option((7, 15), help="draft tokens of the trees")

    def __post_init__(self) -> None:
        """Raises ConfigError where a vote is asked for and nobody is added."""
        if self.electorates and not self.added:
            raise ConfigError("--added: say who is added to the electorates")


def widths_of(record: ProposalRecord) -> list[int]:
    """How many proposals are shown."""
    width = record.facts.width
    if record.facts.kind != SuperposedProposer.kind:
        return [width]
    return sorted({1, min(sequences_of(record), width), width})


def sequences_of(record: ProposalRecord) -> int:
    return int(record.facts.options.get("num_sequences", SuperposedOptions.num_sequences))


def mean_tokens(replay: Replay, id_: str, width: int) -> float:
    """Draft tokens of all proposals of one place, merged into a tree."""
    record = replay.recording.records[id_]
    places = [place for text in range(record.num_texts) for place in record.of_text(text)]
    return statistics.mean(len(Ballot(shortened(place, 255, width))) for place in places)


def alone(replay: Replay, id_: str) -> list[dict[str, Any]]:
    record = replay.recording.records[id_]
    length = record.facts.num_speculative_tokens
    found = []
    for width in widths_of(record):
        policies = Policies(num_speculative_tokens=length, width=width, drafter_ids=(id_,))
        counts = bound_of(replay, policies, True)
        found.append(
            {
                "drafter": id_,
                "length": length,
                "width": width,
                "all": counts.length,
                "interval": counts.interval(),
                "is_whole": width == record.facts.width,
                "tokens": mean_tokens(replay, id_, width),
                "ms": 1000 * statistics.median(record.asked_s),
            }
        )
    return found


def votes(replay: Replay, electorate: Sequence[str], base: Policies, budgets: Sequence[int]) -> list[Counts]:
    """The calibrated chain, and a tree of each budget."""
    shapes = [replace(base, shape="chain")]
    shapes += [replace(base, shape="tree", max_draft_tokens=budget) for budget in budgets]
    return [counts_of(replay, replace(policies, drafter_ids=tuple(electorate))) for policies in shapes]


def gained(counts: Counts, before: Counts) -> str:
    low, high = over_texts(len(counts.rounds), lambda texts: counts.of(texts) - before.of(texts))
    return f"{counts.length:.3f} ({low:+.3f} to {high:+.3f})"


def main() -> int:
    config = load_config(
        SuperposedConfig, sys.argv[1:], prog="python -m bench.replay_superposed", description=__doc__ or ""
    )
    shown: list[dict[str, Any]] = []
    for folder in config.recordings:
        replay = Replay(open_recording(folder, config.drafters))
        shown += [one for id_ in config.drafters for one in alone(replay, id_)]
    rows = [
        [
            one["drafter"],
            str(one["length"]),
            str(one["width"]),
            f"{one['all']:.3f} ({one['interval'][0]:.2f} to {one['interval'][1]:.2f})",
            f"{one['tokens']:.1f}",
            # Of a drafter that was asked for all of them.
            f"{one['ms']:.1f}" if one["is_whole"] else "",
        ]
        for one in shown
    ]
    texts = replay.recording.texts
    facts = {
        "texts": len(texts),
        "tokens": sum(len(text.output_token_ids) for text in texts),
        "model": replay.recording.meta.model,
        "origin": replay.recording.meta.origin,
        "drafters": {
            id_: {name: Path(value).name for name, value in record.facts.options.items()}
            for id_, record in replay.recording.records.items()
        },
    }
    publish("replay_superposed", HEADER, rows, facts | {"alone": shown})
    if not config.electorates:
        return 0
    named = [entry.split("+") for entry in config.electorates]
    everybody = sorted({id_ for ids in named for id_ in ids} | set(config.added))
    replay = Replay(open_recording(config.recordings[-1], everybody))
    length = min(record.facts.num_speculative_tokens for record in replay.recording.records.values())
    base = Policies(num_speculative_tokens=length, width=config.width)
    table, lengths = [], {}
    for ids in named:
        before = votes(replay, ids, base, config.budgets)
        table.append([", ".join(ids), *map(compared, before, before)])
        lengths["+".join(ids)] = [counts.length for counts in before]
        for id_ in (one for one in config.added if one not in ids):
            after = votes(replay, [*ids, id_], base, config.budgets)
            table.append([f"and {id_}", *map(gained, after, before)])
            lengths["+".join((*ids, id_))] = [counts.length for counts in after]
    shapes = ("chain", *(f"tree of {budget}" for budget in config.budgets))
    header = ("calibrated vote of", *(f"{shape} (more than without, 95 %)" for shape in shapes))
    publish("replay_superposed_votes", header, table, facts | {"lengths": lengths}, script="replay_superposed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
