"""What the vote brings: acceptance of every vote, weight policy and shape on one recording, and the bounds.

    python -m lab.bench.replay_votes --recording DIR [--drafters a,b,c] [--width 1] [-k 8]

DIR: of `moot replay record`. Exact: the texts do not depend on drafts. The interval is over texts: the acceptance
length of 2000 samples of as many texts, drawn with replacement (seed 0). The section `drafter_sets` of the page says
what each drafter brings to the others, and which pair with the best one is best; its intervals are those of the
difference from all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lab.bench.harness.pages import Bench, Table
from lab.bench.replays.report import Counts, RecordingConfig, bound_of, counts_of, facts_of, shapes_of
from lab.replay.evaluate import Policies, Replay
from lab.replay.folder import open_recording
from moot.config import option

BENCH = Bench("replay_votes", __doc__, measures=("moot/core", "moot/drafters", "lab/replay"))
HEADER = ("policy", "acceptance length", "95 % over texts", "drafted per round", "of the way to the bound")


@dataclass(frozen=True, kw_only=True)
class Config(RecordingConfig):
    num_speculative_tokens: int = option(8, help="K (or -k)")
    width: int = option(1, help="proposals that each drafter makes")
    budgets: tuple[int, ...] = option((7, 15), help="draft tokens of the trees")


def row(name: str, counts: Counts, single: float, bound: float) -> list[str]:
    low, high = counts.interval()
    drafted = "" if counts.drafted is None else f"{sum(counts.drafted) / max(sum(counts.rounds), 1):.2f}"
    way = f"{(counts.length - single) / (bound - single):.0%}" if bound > single else ""
    return [name, f"{counts.length:.3f}", f"{low:.2f} to {high:.2f}", drafted, way]


def hindsight(replay: Replay, singles: Mapping[str, Counts]) -> Counts:
    """In each category the drafter that turned out best there."""
    groups = [text.group for text in replay.recording.texts]
    best: dict[str, Counts] = {}
    for group in set(groups):
        places = [place for place, name in enumerate(groups) if name == group]
        best[group] = max((counts.of(places), id_, counts) for id_, counts in singles.items())[2]
    chosen = [(best[group], place) for place, group in enumerate(groups)]
    return Counts(
        [counts.rounds[place] for counts, place in chosen],
        [counts.accepted[place] for counts, place in chosen],
        [(counts.drafted or [0] * len(groups))[place] for counts, place in chosen],
    )


def variants(base: Policies, budgets: Sequence[int]) -> dict[str, Policies]:
    chains = replace(base, shape="chain")
    found = {
        f"{vote}, {weights} weights": replace(chains, vote=vote, weights=weights)
        for vote, weights in (
            *(("majority", weights) for weights in ("uniform", "minions", "hedge")),
            *(("accumulated", "hedge"), ("best", "hedge")),
        )
    }
    found["calibrated"] = replace(chains, vote="calibrated")
    for budget in budgets:
        for shape in ("siblings", "tree"):
            found[f"calibrated, {shape} of {budget}"] = replace(base, shape=shape, max_draft_tokens=budget)
        tree = replace(base, vote="majority", shape="tree", max_draft_tokens=budget)
        found[f"majority (hedge), tree of {budget}"] = tree
    return found


def drafter_sets(ids: Sequence[str], best: str) -> dict[str, tuple[str, ...]]:
    """All drafters, all but each of them, and the best one with each other."""
    found = {"all": tuple(ids)}
    if len(ids) > 2:
        found |= {f"without {left_out}": tuple(id_ for id_ in ids if id_ != left_out) for left_out in ids}
        found |= {f"{best} and {other}": (best, other) for other in ids if other != best}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    replay = Replay(open_recording(config.recording, config.drafters))
    base = Policies(num_speculative_tokens=config.num_speculative_tokens, width=config.width)
    singles = {id_: counts_of(replay, base.with_only(id_)) for id_ in replay.drafter_ids}
    best = max(singles, key=lambda id_: singles[id_].length)
    coherent, loose = bound_of(replay, base, True), bound_of(replay, base, False)
    found = {
        f"best single drafter ({best})": singles[best],
        "best single drafter per category, in hindsight": hindsight(replay, singles),
        **{name: counts_of(replay, policies) for name, policies in variants(base, config.budgets).items()},
        "bound: every proposal verified": coherent,
        "bound: any drafter right at each depth": loose,
    }
    facts = facts_of(replay.recording) | {
        "lengths": {name: counts.length for name, counts in found.items()},
        "singles": {id_: counts.length for id_, counts in singles.items()},
        "num_speculative_tokens": config.num_speculative_tokens,
        "width": config.width,
    }
    rows = [row(name, counts, singles[best].length, coherent.length) for name, counts in found.items()]
    BENCH.publish(config, Table(HEADER, rows), facts, HEADER[1], argv=argv)
    shapes = shapes_of(base, config.budgets)
    voted = {
        name: [counts_of(replay, replace(policies, drafter_ids=ids)) for policies in shapes.values()]
        for name, ids in drafter_sets(replay.drafter_ids, best).items()
    }
    pairs = [name for name in voted if " and " in name]
    weaker = set(pairs) - {max(pairs, key=lambda name: voted[name][-1].length, default="")}
    lines = [
        [name, *(one.beside(whole) for one, whole in zip(counts, voted["all"], strict=True))]
        for name, counts in voted.items()
        if name not in weaker
    ]
    header = ("calibrated vote of", *(f"{shape} (less all, 95 %)" for shape in shapes))
    lengths = {name: [one.length for one in counts] for name, counts in voted.items()}
    BENCH.publish(config, Table(header, lines), {"lengths": lengths}, header[-1], part="drafter_sets", argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
