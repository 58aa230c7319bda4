"""What stages spare a draft model: seconds to draft for recorded texts, alone and with cheaper drafters that guess.

    python -m bench.staged_drafting --recording DIR [--model DRAFT] [--stages suffix,prompt_lookup] [-k 8]

Each text is gone through in rounds as a verifier would: the draft model is asked for K tokens, and what of them is the
text's, and one more token, is committed. All ways propose the same (counted), so only time differs. Without `--model`
the recording's own target stands for the draft model of a larger target.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.intervals import Interval, interleaved, ratios
from lab.bench.report import publish
from lab.replay.folder import read_meta
from lab.replay.texts import TargetText, load_texts
from moot.config import load_config, option
from moot.core.errors import ConfigError
from moot.core.generation import num_leading
from moot.core.types import SamplingParams
from moot.drafters.base import Ask
from moot.drafters.neural.neural import NeuralProposer
from moot.drafters.registry import create

Said = dict[tuple[str, int], tuple[int, ...]]
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class StagedConfig:
    recording: Path = option(help="folder of a recording")
    model: str = option("", help="folder of the draft model; empty: the recording's target")
    stages: tuple[str, ...] = option(("suffix", "prompt_lookup"), help="what to try, each as the option `stages`")
    k: int = option(8, help="tokens asked for in a round")
    texts: int = option(6, help="texts, evenly spread over the recording")
    tokens: int = option(48, help="output tokens of each text")
    rounds: int = option(7, help="interleaved measurements of each way")
    num_threads: int = option(2, help="compute threads")


@dataclass(frozen=True, slots=True)
class Way:
    """One proposer, and what it proposed at its first time through all texts."""

    name: str
    proposer: NeuralProposer
    num_forwards: list[int]


def drafted(proposer: NeuralProposer, texts: Sequence[TargetText], config: StagedConfig) -> tuple[float, Said]:
    """Seconds of all proposals, reading the prompts not counted, and the ids of each by text and place."""
    seconds = 0.0
    said: Said = {}
    for text in texts:
        output = list(text.output_token_ids[: config.tokens])
        done = 1
        session = proposer.open([*text.prompt_token_ids, *output[:1]], GREEDY)
        while proposer.warm(session):
            pass
        while done < len(output):
            begin = time.perf_counter()
            chains = proposer.propose([Ask(session, config.k)])[0]
            seconds += time.perf_counter() - begin
            ids = chains[0].token_ids if chains else ()
            said[text.name, done] = ids
            step = num_leading(ids, output[done:]) + 1
            proposer.extend(session, output[done : done + step])
            done += step
        proposer.close(session)
    return seconds, said


def counted(proposer: NeuralProposer) -> list[int]:
    """A list that gets an entry for each forward from now on."""
    calls: list[int] = []
    runner: Any = proposer._runner
    forward: Callable[..., Any] = runner.forward

    def with_count(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*args, **options)

    runner.forward = with_count
    return calls


def main() -> int:
    config = load_config(StagedConfig, sys.argv[1:], prog="python -m bench.staged_drafting", description=__doc__ or "")
    meta = read_meta(config.recording)
    if meta is None:
        raise ConfigError(f"nothing is recorded in {config.recording}")
    recorded = load_texts(config.recording / "texts.npz")
    texts = recorded[:: max(len(recorded) // config.texts, 1)][: config.texts]
    model = config.model or meta.settings["model"]
    ways: list[Way] = []
    first: Said = {}
    for stages in ("", *config.stages):
        options = {"model": model, "dtype": "bfloat16", "num_threads": config.num_threads, "stages": stages}
        proposer = create("neural", options)
        assert isinstance(proposer, NeuralProposer)
        ways.append(Way(stages or "alone", proposer, counted(proposer)))
    same: dict[str, float] = {}
    forwards: dict[str, int] = {}
    for way in ways:
        _, said = drafted(way.proposer, texts, config)
        forwards[way.name] = len(way.num_forwards)
        first = first or said
        # Rounded differently, a near tie may fall otherwise; then rounds end at other places.
        common = first.keys() & said.keys()
        same[way.name] = sum(first[place] == said[place] for place in common) / len(common)
        print(f"{way.name}: {forwards[way.name]} forwards, {same[way.name]:.3f} of proposals as alone", flush=True)
    measures = {way.name: lambda own=way.proposer: drafted(own, texts, config)[0] for way in ways}
    found = interleaved(measures, config.rounds, warm_up=0)
    rows, facts = [], {}
    for way in ways:
        ratio = ratios(found["alone"], found[way.name])
        guessed, along = way.proposer.stage_counts
        right = f"{along / guessed:.2f}" if guessed else ""
        times = (Interval.of(found[way.name]).text(), ratio.text())
        rows.append([way.name, *times, forwards[way.name], right, f"{same[way.name]:.3f}"])
        facts[way.name] = {"seconds": found[way.name], "forwards": forwards[way.name], "same": same[way.name]}
    header = ("stages", "seconds", "times as fast as alone", "forwards", "guesses that were right", "same proposals")
    publish(
        "staged_drafting",
        header,
        rows,
        {"draft_model": Path(model).name, "texts": [text.name for text in texts], "k": config.k, "ways": facts},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
