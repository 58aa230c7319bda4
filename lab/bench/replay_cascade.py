"""What a cascade spares and costs: rounds in which dear drafters are not asked, and acceptance, from one recording.

    python -m bench.replay_cascade --recording DIR [--cascades 1,0.6,0.3] [--shape chain] [--verify-ms 13]

DIR: of `moot replay record`. Who is dear is decided as in a router, by the time that answers took when they were
recorded; drafters inside the verifier answer before anybody is asked. Tokens per second are the replay's clock's:
`--verify-ms` and `--verify-row-ms` say what a step costs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.replay_votes import Counts, over_texts
from lab.bench.report import publish
from lab.replay.evaluate import Outcome, Policies, Replay, outcome_of
from lab.replay.folder import open_recording
from lab.replay.rounds import Clock
from moot.commands.replay import SHORT
from moot.config import load_config, option
from moot.core.speculation.panel import ALWAYS_ASK
from moot.core.voting.tree import SHAPES
from moot.simulation.costs import StepCost

HEADER = (
    "cascade",
    "acceptance length",
    "95 % over texts, of what all bring",
    "not asked, of the rounds",
    "drafting, ms a round",
    "tokens/s by the clock, of all",
)


@dataclass(frozen=True, kw_only=True)
class CascadeConfig:
    recording: Path = option(help="folder of a recording")
    drafters: tuple[str, ...] = option((), help="ids of those that vote (none: all that were recorded)")
    cascades: tuple[float, ...] = option(
        (ALWAYS_ASK, 0.6, 0.4, 0.3, 0.2, 0.1), help="thresholds; the first is compared with"
    )
    num_speculative_tokens: int = option(8, help="K (or -k)")
    width: int = option(1, help="proposals that each drafter makes")
    shape: str = option("chain", help="what is verified", choices=tuple(SHAPES))
    max_draft_tokens: int = option(15, help="tokens of one draft, all branches of a tree together")
    verify_ms: float = option(13.0, help="milliseconds of a verify step")
    verify_row_ms: float = option(0.45, help="milliseconds of each draft token in it")


def replayed(replay: Replay, policies: Policies) -> tuple[Counts, Outcome]:
    played = replay.run(policies)
    generations = [one.generation for one in played]
    counts = Counts([one.num_rounds for one in generations], [one.num_accepted_tokens for one in generations])
    return counts, outcome_of(played)


def row(name: str, counts: Counts, outcome: Outcome, whole: Counts, whole_outcome: Outcome) -> list[str]:
    low, high = over_texts(len(counts.rounds), lambda texts: counts.of(texts) / whole.of(texts))
    spared = ", ".join(f"{id_} {count / outcome.num_rounds:.0%}" for id_, count in sorted(outcome.spared.items()))
    return [
        name,
        f"{counts.length:.3f}",
        f"{counts.length / whole.length:.3f} ({low:.2f} to {high:.2f})",
        spared,
        f"{1000 * outcome.draft_seconds / outcome.num_rounds:.1f}",
        f"{outcome.tokens_per_s / whole_outcome.tokens_per_s:.2f}",
    ]


def main() -> int:
    arguments = [SHORT.get(argument, argument) for argument in sys.argv[1:]]
    config = load_config(CascadeConfig, arguments, prog="python -m bench.replay_cascade", description=__doc__ or "")
    replay = Replay(open_recording(config.recording, config.drafters))
    base = Policies(
        shape=config.shape,
        num_speculative_tokens=config.num_speculative_tokens,
        max_draft_tokens=config.max_draft_tokens,
        width=config.width,
        clock=Clock(step=StepCost.line(config.verify_ms / 1000, config.verify_row_ms / 1000)),
    )
    found = {cascade: replayed(replay, replace(base, cascade=cascade)) for cascade in config.cascades}
    dear = {id_ for _, outcome in found.values() for id_ in outcome.spared}
    first = found[config.cascades[0]]
    rows = [row(f"{cascade:g}", *one, *first) for cascade, one in found.items()]
    facts: dict[str, Any] = {
        "lengths": {cascade: counts.length for cascade, (counts, _) in found.items()},
        "spared": {cascade: dict(outcome.spared) for cascade, (_, outcome) in found.items()},
        "rounds": {cascade: outcome.num_rounds for cascade, (_, outcome) in found.items()},
        "draft_seconds": {cascade: outcome.draft_seconds for cascade, (_, outcome) in found.items()},
        "tokens_per_s": {cascade: outcome.tokens_per_s for cascade, (_, outcome) in found.items()},
        "drafters": list(replay.drafter_ids),
        "dear": sorted(dear),
        "texts": len(replay.recording.texts),
    }
    if dear:
        others = tuple(id_ for id_ in replay.drafter_ids if id_ not in dear)
        without = replayed(replay, replace(base, drafter_ids=others))
        rows.append(row(f"without {' and '.join(sorted(dear))}", *without, *first))
        facts["without"] = {"length": without[0].length, "tokens_per_s": without[1].tokens_per_s}
    publish("replay_cascade", HEADER, rows, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
