"""What a prediction is worth that is partly wrong: tokens per round, by how often the answer departs from it.

    python -m bench.prediction_edits --recording DIR [-k 4,8]

Recorded answers are the text; each is predicted with every n-th token edited: replaced, left out, or preceded by one to
eight others, at places and with ids drawn by a seed. A round proposes K tokens and is given what of them is the text's
and one token more. The suffix drafter, which is told prompt and output only, stands beside it. No clock: it counts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.report import publish
from lab.replay.folder import read_meta
from lab.replay.texts import TargetText, load_texts
from moot.config import load_config, option
from moot.core.errors import ConfigError
from moot.core.generation import num_leading
from moot.core.types import SamplingParams
from moot.drafters.base import Ask, Material, Proposer
from moot.drafters.registry import create

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class EditsConfig:
    recording: Path = option(help="folder of a recording")
    k: tuple[int, ...] = option((4, 8), help="tokens asked for in a round")
    every: tuple[int, ...] = option((0, 50, 20, 10, 5), help="mean distance of edits in tokens; 0: none")
    seed: int = option(0, help="of the edits")


def edited(text: Sequence[int], every: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    """A prediction that the text departs from about once in `every` tokens."""
    prediction: list[int] = []
    for token in text:
        edit = rng.choice(("replace", "leave out", "put in")) if every and rng.random() < 1 / every else ""
        if edit == "put in":
            prediction += [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 9))]
        if edit == "replace":
            prediction.append(rng.randrange(vocab_size))
        elif edit != "leave out":
            prediction.append(token)
    return tuple(prediction)


def tokens_and_rounds(
    proposer: Proposer[Any], text: TargetText, prediction: tuple[int, ...], k: int
) -> tuple[int, int]:
    """The opening's token is of no round."""
    output, done, rounds = text.output_token_ids, 1, 0
    material = Material(len(text.prompt_token_ids), prediction)
    session = proposer.open_request([*text.prompt_token_ids, *output[:1]], GREEDY, material)
    while done < len(output):
        chains = proposer.propose([Ask(session, min(k, len(output) - done))])[0]
        step = num_leading(chains[0].token_ids if chains else (), output[done:]) + 1
        proposer.extend(session, output[done : done + step])
        done, rounds = done + step, rounds + 1
    proposer.close(session)
    return len(output) - 1, rounds


def main() -> int:
    config = load_config(EditsConfig, sys.argv[1:], prog="python -m bench.prediction_edits", description=__doc__ or "")
    meta = read_meta(config.recording)
    if meta is None:
        raise ConfigError(f"nothing is recorded in {config.recording}")
    texts = [text for text in load_texts(config.recording / "texts.npz") if len(text.output_token_ids) > 1]
    rows: list[list[str]] = []
    facts: dict[str, dict[str, float]] = {}
    for name, every in (
        *((f"prediction, an edit in {n}" if n else "prediction", n) for n in config.every),
        ("suffix", 0),
    ):
        proposer = create("suffix" if name == "suffix" else "prediction", {"vocab_size": meta.vocab_size})
        facts[name] = {}
        for k in config.k:
            rng = random.Random(config.seed)
            counts = [
                tokens_and_rounds(proposer, text, edited(text.output_token_ids, every, meta.vocab_size, rng), k)
                for text in texts
            ]
            facts[name][str(k)] = sum(tokens for tokens, _ in counts) / sum(rounds for _, rounds in counts)
        rows.append([name, *(f"{value:.2f}" for value in facts[name].values())])
        print(*rows[-1], flush=True)
    publish(
        "prediction_edits",
        ("drafter", *(f"mean acceptance length, K = {k}" for k in config.k)),
        rows,
        {"model": meta.model, "texts": len(texts), "lengths": facts},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
