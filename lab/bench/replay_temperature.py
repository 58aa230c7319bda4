"""What the noise of drafts is worth at temperature > 0: acceptance of greedy, independent and coupled drafts.

    python -m bench.replay_temperature --prompts FILE --out DIR [--temperatures 0.3,0.7,1.0] [--limit 24] [-k 4]

The target's texts are sampled once per temperature, its drafters with a distribution propose after every token of them
in each way, and votes and trees are replayed: exact, but for the choice of texts. DIR keeps the recordings, one folder
per temperature; interrupted, it goes on where it was. An interval is over texts: 2000 samples of as many, drawn with
replacement (seed 0), both ways on the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lab.bench.replay_votes import Counts, counts_of, over_texts
from lab.bench.report import publish
from lab.replay.evaluate import Policies, Replay
from lab.replay.folder import open_recording
from lab.replay.making import Machine, TextPlan, make_texts, target_runner
from lab.replay.prompts import read_prompts
from lab.replay.recorder import Asking, record_drafter
from moot.commands.common import say
from moot.commands.replay import SHORT
from moot.commands.system import DEMO_MODEL, prepared_model
from moot.config import load_config, option
from moot.drafters.base import DrafterEntry, parse_entries
from moot.drafters.neural.draft_model import COUPLED, GREEDY, INDEPENDENT
from moot.model.runner import ModelRunner

SHARPER = "sharper"
WAYS: Mapping[str, Mapping[str, str]] = {
    GREEDY: {"draws": GREEDY},
    INDEPENDENT: {"draws": INDEPENDENT},
    COUPLED: {"draws": COUPLED},
    # Logits over 0.85 T.
    SHARPER: {"draws": COUPLED, "sharpen": str(1 / 0.85)},
}
Table = dict[str, dict[str, Counts]]
"""By line of the table and way of drawing."""
HEADER = ("T", "", *WAYS, "coupled less greedy, 95 % over texts")


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    target: str = option(DEMO_MODEL, help="the model that writes the texts")
    prompts: Path = option(help="JSON lines, as `moot replay record` takes them")
    held_out: tuple[str, ...] = option(("7",), help="only prompts whose id ends in one of these digits")
    limit: int = option(24, help="prompts at most, evenly over the categories")
    out: Path = option(help="folder of the recordings")
    temperatures: tuple[float, ...] = option((0.3, 0.7, 1.0), help="of target and drafts")
    models: tuple[str, ...] = option(
        ("heads=heads:path=shipped@heads-smollm2-135m", "neural=neural:model=shipped@neural-smollm2-135m"),
        help="drafters with a distribution",
    )
    points: tuple[str, ...] = option(
        (
            "suffix=suffix:datastore=shipped@suffix-smollm2-135m",
            "table=ngram:table=shipped@ngram-smollm2-135m",
            "recycling",
        ),
        help="drafters without one, the first of which is shown by itself",
    )
    num_speculative_tokens: int = option(4, help="K (or -k)")
    widths: tuple[int, ...] = option((1, 4), help="proposals that each drafter makes")
    budgets: tuple[int, ...] = option((7, 15), help="draft tokens of the trees")
    max_tokens: int = option(128, help="longest text, in tokens")
    dtype: str = option("auto", help="number format of the target")
    num_threads: int = option(0, help="compute threads; 0: torch's choice")


def in_way(entry: DrafterEntry, way: str) -> DrafterEntry:
    """A drafter with a distribution, drawing in one of the WAYS."""
    return DrafterEntry(f"{entry.drafter_id}_{way}", entry.kind, entry.options | dict(WAYS[way]))


def recorded(
    config: TemperatureConfig, temperature: float, target: Callable[[], ModelRunner], plan: TextPlan
) -> Replay:
    """The texts at `temperature` and what everybody proposes there, as far as it is not recorded yet."""
    folder = config.out / f"temperature-{temperature}"
    machine = Machine(num_threads=config.num_threads or None)
    prompts = read_prompts(config.prompts, config.held_out, config.limit)
    meta, texts = make_texts(folder, replace(plan, temperature=temperature), machine, prompts, say)
    asking = Asking(config.num_speculative_tokens, max(config.widths))
    models, points = parse_entries(config.models, "--models"), parse_entries(config.points, "--points")
    entries = [*points, *(in_way(entry, way) for entry in models for way in WAYS)]
    for entry in entries:
        record_drafter(folder, entry, texts, meta.vocab_size, asking, say, target)
    return Replay(open_recording(folder, [entry.drafter_id for entry in entries]))


def compared(
    replay: Replay,
    base: Policies,
    models: Sequence[str],
    points: Sequence[str],
    widths: Sequence[int],
    budgets: Sequence[int],
) -> Table:
    """Per line and way the counts. Lines of drafters without a distribution have one, for all ways."""
    found: Table = {}
    for model in models:
        found[f"{model} alone"] = {way: counts_of(replay, base.with_only(f"{model}_{way}")) for way in WAYS}
    found[f"{points[0]} alone"] = {"": counts_of(replay, base.with_only(points[0]))}
    shapes = {"voted chain": replace(base, shape="chain")}
    shapes |= {f"tree of {budget}": replace(base, shape="tree", max_draft_tokens=budget) for budget in budgets}
    for name, shape in shapes.items():
        for width in widths:
            policies = replace(shape, width=width)
            found[f"{name}, {width} each"] = {
                way: counts_of(
                    replay, replace(policies, drafter_ids=(*points, *(f"{model}_{way}" for model in models)))
                )
                for way in WAYS
            }
        alone = counts_of(replay, replace(shape, width=max(widths), drafter_ids=tuple(points)))
        found[f"{name}, {max(widths)} each, without {' and '.join(models)}"] = {"": alone}
    return found


def row(temperature: float, name: str, counts: Mapping[str, Counts]) -> list[str]:
    if COUPLED not in counts:
        (only,) = counts.values()
        return [str(temperature), name, *[f"{only.length:.3f}"] * len(WAYS), ""]
    coupled, greedy = counts[COUPLED], counts[GREEDY]
    low, high = over_texts(len(coupled.rounds), lambda texts: coupled.of(texts) - greedy.of(texts))
    lengths = [f"{counts[way].length:.3f}" for way in WAYS]
    gain = f"{coupled.length - greedy.length:+.3f} ({low:+.2f} to {high:+.2f})"
    return [str(temperature), name, *lengths, gain]


def main() -> int:
    arguments = [SHORT.get(argument, argument) for argument in sys.argv[1:]]
    config = load_config(
        TemperatureConfig, arguments, prog="python -m bench.replay_temperature", description=__doc__ or ""
    )
    plan = TextPlan(model=str(prepared_model(config.target, say)), max_tokens=config.max_tokens, dtype=config.dtype)
    machine = Machine(num_threads=config.num_threads or None)
    target = cache(lambda: target_runner(plan, machine))
    models = [entry.drafter_id for entry in parse_entries(config.models, "--models")]
    points = [entry.drafter_id for entry in parse_entries(config.points, "--points")]
    base = Policies(num_speculative_tokens=config.num_speculative_tokens)
    rows: list[list[str]] = []
    facts: dict[str, Any] = {
        "k": config.num_speculative_tokens,
        "widths": config.widths,
        "lengths": {},
        "intervals": {},
    }
    tables: dict[float, Table] = {}
    for temperature in config.temperatures:
        say(f"temperature {temperature}")
        replay = recorded(config, temperature, target, plan)
        tables[temperature] = found = compared(replay, base, models, points, config.widths, config.budgets)
        rows += [row(temperature, name, counts) for name, counts in found.items()]
        facts["lengths"][temperature] = {
            name: {way: one.length for way, one in counts.items()} for name, counts in found.items()
        }
        facts["intervals"][temperature] = {
            name: {way: one.interval() for way, one in counts.items()} for name, counts in found.items()
        }
        facts["texts"] = len(replay.recording.texts)
        facts.setdefault("tokens", {})[temperature] = sum(len(text.output_token_ids) for text in replay.recording.texts)

    def draw(figure: Any) -> None:
        names = [name for name, counts in tables[config.temperatures[0]].items() if COUPLED in counts]
        for place, temperature in enumerate(config.temperatures):
            axes = figure.add_subplot(1, len(config.temperatures), place + 1)
            for number, way in enumerate(WAYS):
                at = [index + 0.2 * number for index in range(len(names))]
                axes.barh(at, [tables[temperature][name][way].length - 1 for name in names], 0.19, left=1, label=way)
            axes.set_yticks([index + 0.3 for index in range(len(names))], names if place == 0 else [""] * len(names))
            axes.set(xlabel=f"mean acceptance length, T = {temperature}")
            axes.invert_yaxis()
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(WAYS))

    publish("replay_temperature", HEADER, rows, facts, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
