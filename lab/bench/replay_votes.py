"""What the vote brings: acceptance of every vote, weight policy and shape on one recording, and the bounds.

    python -m bench.replay_votes --recording DIR [--drafters a,b,c] [--width 1] [-k 8]

DIR: of `moot replay record`. Exact: the texts do not depend on drafts. The interval is over texts: the acceptance
length of 2000 samples of as many texts, drawn with replacement (seed 0). A second table (`replay_electorates`) says
what each drafter brings to the others and to the best one; its intervals are those of the difference from all.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.report import publish
from lab.replay.evaluate import Policies, Replay
from lab.replay.folder import open_recording
from moot.commands.replay import SHORT
from moot.config import load_config, option

HEADER = ("policy", "acceptance length", "95 % over texts", "drafted per round", "of the way to the bound")
SAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class VotesConfig:
    recording: Path = option(help="folder of a recording")
    drafters: tuple[str, ...] = option((), help="ids of those that vote (none: all that were recorded)")
    num_speculative_tokens: int = option(8, help="K (or -k)")
    width: int = option(1, help="proposals that each drafter makes")
    budgets: tuple[int, ...] = option((7, 15), help="draft tokens of the trees")


def over_texts(num_texts: int, value: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """95 % interval of a value of some texts: of as many, drawn with replacement, each time the same ones."""
    draw = random.Random(0)
    found = sorted(value(draw.choices(range(num_texts), k=num_texts)) for _ in range(SAMPLES))
    return found[round(0.025 * SAMPLES)], found[round(0.975 * SAMPLES) - 1]


@dataclass(frozen=True, slots=True)
class Counts:
    """Per text, in the order of the recording: rounds, accepted and drafted tokens."""

    rounds: Sequence[int]
    accepted: Sequence[int]
    drafted: Sequence[int] | None = None

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / max(sum(self.rounds), 1)

    def of(self, texts: Sequence[int]) -> float:
        """Acceptance length over some of the texts, which may be named more than once."""
        return 1 + sum(self.accepted[i] for i in texts) / max(sum(self.rounds[i] for i in texts), 1)

    def interval(self) -> tuple[float, float]:
        return over_texts(len(self.rounds), self.of)

    def row(self, name: str, single: float, bound: float) -> list[str]:
        low, high = self.interval()
        drafted = "" if self.drafted is None else f"{sum(self.drafted) / max(sum(self.rounds), 1):.2f}"
        way = f"{(self.length - single) / (bound - single):.0%}" if bound > single else ""
        return [name, f"{self.length:.3f}", f"{low:.2f} to {high:.2f}", drafted, way]


def counts_of(replay: Replay, policies: Policies) -> Counts:
    generations = [one.generation for one in replay.run(policies)]
    return Counts(
        [one.num_rounds for one in generations],
        [one.num_accepted_tokens for one in generations],
        [one.num_draft_tokens for one in generations],
    )


def bound_of(replay: Replay, policies: Policies, coherent: bool) -> Counts:
    found = replay.bound(policies, coherent=coherent)
    return Counts([rounds for _, rounds, _ in found], [accepted for _, _, accepted in found])


def hindsight(replay: Replay, singles: dict[str, Counts]) -> Counts:
    """In each category the drafter that turned out best there."""
    rounds, accepted, drafted = [], [], []
    groups = [text.group for text in replay.recording.texts]
    best: dict[str, Counts] = {}
    for group in set(groups):
        places = [place for place, name in enumerate(groups) if name == group]

        def length(counts: Counts, places: list[int] = places) -> float:
            return sum(counts.accepted[i] for i in places) / max(sum(counts.rounds[i] for i in places), 1)

        best[group] = max(singles.values(), key=length)
    for place, group in enumerate(groups):
        rounds.append(best[group].rounds[place])
        accepted.append(best[group].accepted[place])
        drafted.append((best[group].drafted or [0] * len(groups))[place])
    return Counts(rounds, accepted, drafted)


def variants(base: Policies, budgets: Sequence[int]) -> dict[str, Policies]:
    chains = replace(base, shape="chain")
    found = {
        "majority, uniform weights": replace(chains, vote="majority", weights="uniform"),
        "majority, minions weights": replace(chains, vote="majority", weights="minions"),
        "majority, hedge weights": replace(chains, vote="majority", weights="hedge"),
        "accumulated, hedge weights": replace(chains, vote="accumulated", weights="hedge"),
        "best, hedge weights": replace(chains, vote="best", weights="hedge"),
        "calibrated": replace(chains, vote="calibrated"),
    }
    for budget in budgets:
        for shape in ("siblings", "tree"):
            found[f"calibrated, {shape} of {budget}"] = replace(base, shape=shape, max_draft_tokens=budget)
        found[f"majority (hedge), tree of {budget}"] = replace(
            base, vote="majority", shape="tree", max_draft_tokens=budget
        )
    return found


def electorates(replay: Replay, base: Policies, budgets: Sequence[int], best: str) -> dict[str, list[Counts]]:
    """The calibrated chain and trees of all drafters, without each of them, and of the best one with each other."""
    shapes = [replace(base, shape="chain")]
    shapes += [replace(base, shape="tree", max_draft_tokens=budget) for budget in budgets]
    voters = {"all": replay.drafter_ids}
    if len(replay.drafter_ids) > 2:
        for left_out in replay.drafter_ids:
            voters[f"without {left_out}"] = tuple(id_ for id_ in replay.drafter_ids if id_ != left_out)
        voters |= {f"{best} and {other}": (best, other) for other in replay.drafter_ids if other != best}
    return {
        name: [counts_of(replay, replace(policies, drafter_ids=ids)) for policies in shapes]
        for name, ids in voters.items()
    }


def compared(counts: Counts, whole: Counts) -> str:
    """Acceptance length, and what is missing of `whole`, with its 95 % interval over texts."""
    if counts == whole:
        return f"{counts.length:.3f}"
    low, high = over_texts(len(counts.rounds), lambda texts: counts.of(texts) - whole.of(texts))
    return f"{counts.length:.3f} ({low:+.3f} to {high:+.3f})"


def main() -> int:
    arguments = [SHORT.get(argument, argument) for argument in sys.argv[1:]]
    config = load_config(VotesConfig, arguments, prog="python -m bench.replay_votes", description=__doc__ or "")
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
    rows = [counts.row(name, singles[best].length, coherent.length) for name, counts in found.items()]
    meta = replay.recording.meta
    facts: dict[str, Any] = {
        "lengths": {name: counts.length for name, counts in found.items()},
        "intervals": {name: counts.interval() for name, counts in found.items()},
        "singles": {id_: counts.length for id_, counts in singles.items()},
        "texts": len(replay.recording.texts),
        "tokens": sum(len(text.output_token_ids) for text in replay.recording.texts),
        "model": meta.model,
        "origin": meta.origin,
        "drafters": {
            id_: {name: Path(value).name for name, value in record.facts.options.items()}
            for id_, record in replay.recording.records.items()
        },
        "num_speculative_tokens": config.num_speculative_tokens,
        "width": config.width,
    }

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names, lengths = list(found)[::-1], [counts.length for counts in found.values()][::-1]
        axes.barh(names, [length - 1 for length in lengths], left=1)
        for place, length in enumerate(lengths):
            axes.text(length, place, f" {length:.2f}", va="center")
        axes.set(xlabel=f"mean acceptance length, K = {config.num_speculative_tokens}", xlim=(1, max(lengths) * 1.08))

    publish("replay_votes", HEADER, rows, facts, draw)
    voters = electorates(replay, base, config.budgets, best)
    shapes = ("chain", *(f"tree of {budget}" for budget in config.budgets))
    header = ("calibrated vote of", *(f"{shape} (less all, 95 %)" for shape in shapes))
    publish(
        "replay_electorates",
        header,
        [[name, *map(compared, found, voters["all"])] for name, found in voters.items()],
        {"lengths": {name: [counts.length for counts in found] for name, found in voters.items()}},
        script="replay_votes",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
