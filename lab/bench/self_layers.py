"""Which layers of the target its own drafts can do without: greedy removal, measured on recorded texts.

    python -m bench.self_layers --recording DIR [--removals 6] [--texts 4]

DIR: of `moot replay record`, whose texts are the target's own, of prompts that nothing is measured on later. In every
round each layer that is left is left out in turn, and the one goes whose loss costs the least agreement with the text.
A draft model of its own would see keys and values of the kept layers only, and so does this measurement. A drafter
`self` sees the whole target's for committed tokens: `moot replay record --drafters self:skip=...` shows its worth.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.bench.report import publish
from lab.replay.folder import read_meta
from lab.replay.making import Machine, TextPlan, target_runner
from lab.replay.target import CHUNK_TOKENS
from lab.replay.texts import TargetText, load_texts
from moot.config import load_config, option
from moot.core.errors import ConfigError
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner

PASSES = 15


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    recording: Path = option(help="folder of a recording")
    removals: int = option(6, help="layers to leave out")
    texts: int = option(4, help="texts to measure on, from the first")
    longest: int = option(256, help="tokens of prompt and output that are looked at: the last ones of longer texts")
    num_threads: int = option(0, help="compute threads; 0: torch's choice")


@torch.inference_mode()
def agreement(runner: ModelRunner, texts: Sequence[TargetText], longest: int, layers: tuple[int, ...]) -> float:
    """Part of the output tokens that a pass through `layers` alone would have chosen, each after the true text."""
    same = total = 0
    for text in texts:
        ids = [*text.prompt_token_ids, *text.output_token_ids][-longest:]
        first = max(len(ids) - len(text.output_token_ids), 1)
        cache = runner.new_cache()
        for start in range(0, len(ids) - 1, CHUNK_TOKENS):
            chunk = ids[start : min(start + CHUNK_TOKENS, len(ids) - 1)]
            wanted = range(max(first - 1 - start, 0), len(chunk))
            (logits,) = runner.forward([SequenceInput(cache, chunk, None, wanted)], layers=layers)
            cache.commit(range(len(chunk)))
            said = logits[:, : runner.info.vocab_size].argmax(1).tolist()
            true = [ids[start + row + 1] for row in wanted]
            same += sum(one == other for one, other in zip(said, true, strict=True))
            total += len(true)
        cache.free()
    return same / max(total, 1)


@torch.inference_mode()
def cost(runner: ModelRunner, layers: tuple[int, ...]) -> float:
    """Of one token after 200 others, the target's own = 1: of medians of interleaved passes."""
    cache = runner.new_cache()
    runner.forward([SequenceInput(cache, [5] * 200)])
    cache.commit(range(200))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * PASSES):
        is_part = number % 2 > 0
        begin = time.perf_counter()
        runner.forward([SequenceInput(cache, [5], None, (0,))], layers=layers if is_part else None)
        taken[is_part].append(time.perf_counter() - begin)
    cache.free()
    return statistics.median(taken[True]) / statistics.median(taken[False])


def main() -> int:
    config = load_config(LayersConfig, sys.argv[1:], prog="python -m bench.self_layers", description=__doc__ or "")
    meta = read_meta(config.recording)
    if meta is None:
        raise ConfigError(f"nothing is recorded in {config.recording}")
    settings = meta.settings
    plan = TextPlan(model=settings["model"], dtype=settings["dtype"], deterministic=False)
    runner = target_runner(plan, Machine(num_threads=config.num_threads or None, num_rows=1))
    texts = load_texts(config.recording / "texts.npz")[: config.texts]
    left = tuple(range(runner.loaded.kv_shape.num_layers))
    rows: list[list[str]] = []
    steps: list[dict[str, Any]] = []
    gone: list[int] = []
    for _ in range(config.removals):
        found = {
            layer: agreement(runner, texts, config.longest, tuple(one for one in left if one != layer))
            for layer in left
        }
        best = max(left, key=found.__getitem__)
        left = tuple(one for one in left if one != best)
        gone.append(best)
        share = cost(runner, left)
        steps.append({"removed": best, "kept": len(left), "agreement": found[best], "cost": share})
        skip = "+".join(map(str, gone))
        rows.append([str(len(left)), skip, f"{found[best]:.3f}", f"{share:.2f}"])
        print(f"{len(left)} layers, without {skip}: agreement {found[best]:.3f}, cost {share:.2f}", flush=True)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([one["cost"] for one in steps], [one["agreement"] for one in steps], marker="o")
        axes.set(xlabel="time of a draft token, the target's = 1", ylabel="agreement with the text")

    facts = {"model": meta.model, "texts": len(texts), "steps": steps}
    publish("self_layers", ("layers kept", "skip", "agreement", "cost"), rows, facts, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
