"""What it costs that the text does not depend on the drafter: our acceptance beside that of speculative sampling.

    python -m lab.bench.invariance [--prompts FILE --held-out] [--drafter FOLDER]

Drafter and target draw with the same noise, and a token is accepted where both drew the same one (Daliri, Musco,
Suresh, 2408.07978). Speculative sampling (2211.17192) draws apart and accepts a token with min(1, p / q): more often,
but its text depends on what was drafted. Both chances are worked out exactly from the two models' laws at each place of
the target's own texts, for all that may be drawn there: no draw is in the table. Tokens per round are those of chains
of K that are right with these chances, place by place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.prompts import PromptConfig, read_prompts
from lab.replay.making import Machine, TextPlan, target_runner
from lab.replay.target import CHUNK_TOKENS, RecordedTarget, encode
from moot.commands.common import DEMO_MODEL, say
from moot.commands.system import prepared_model
from moot.config import option
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner

BENCH = Bench("invariance", __doc__, measures=("moot/core/acceptance.py", "moot/model/sampling", "lab/data/drafters"))
DRAFTER = Path(__file__).parents[2] / "data" / "drafters" / "neural-smollm2-135m"
TEMPERATURES = (0.3, 0.7, 1.0)
LENGTHS = (2, 4)
Laws = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Config(PromptConfig):
    target: str = option(DEMO_MODEL, help="the model that writes the texts: a folder, a hub id, or the demo's model")
    drafter: Path = option(DRAFTER, help="folder of a draft model with the same tokenizer")
    num_prompts: int = option(24, help="prompts at each temperature", minimum=1)
    max_tokens: int = option(64, help="longest answer, in tokens", minimum=1)


def apart(target_probs: Laws, draft_probs: Laws) -> float:
    """Chance that speculative sampling accepts a token of `draft_probs`: the sum of min(p, q) [vocab]."""
    return float(np.minimum(target_probs, draft_probs).sum())


def together(target_probs: Laws, draft_probs: Laws) -> float:
    """Chance that both draw the same token on the same noise [vocab], float64.

    A draw is a race: token i arrives at E_i / p_i, E exponential (the Gumbel-max trick). Token x wins both races with
    probability 1 / sum_i max(p_i / p_x, q_i / q_x). In the order of q / p the sum parts into tokens that count by p and
    tokens that count by q.
    """
    both = (target_probs > 0) & (draft_probs > 0)
    only_target = target_probs[(target_probs > 0) & ~both].sum()
    only_draft = draft_probs[(draft_probs > 0) & ~both].sum()
    p, q = target_probs[both], draft_probs[both]
    order = np.argsort(q / p, kind="stable")
    p, q = p[order], q[order]
    by_target = only_target + np.cumsum(p)
    by_draft = only_draft + q.sum() - np.cumsum(q)
    return float((1 / (by_target / p + by_draft / q)).sum())


def tokens_per_round(chances: Sequence[Sequence[float]], length: int) -> float:
    """Mean of 1 + expected accepted tokens of a chain of `length`, from every place of every text."""
    found: list[float] = []
    for one in chances:
        for place in range(len(one)):
            right, expected = 1.0, 1.0
            for chance in one[place : place + length]:
                right *= chance
                expected += right
            found.append(expected)
    return float(np.mean(found))


def laws(runner: ModelRunner, prompt: Sequence[int], output: Sequence[int], temperature: float) -> Iterator[Laws]:
    """Of each place of `output`: probabilities [vocab], float64."""
    cache = runner.new_cache()
    ids = [*prompt, *output[:-1]]
    try:
        for start in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[start : start + CHUNK_TOKENS]
            wanted = range(max(len(prompt) - 1 - start, 0), len(chunk))
            (logits,) = runner.forward([SequenceInput(cache, chunk, None, wanted)])
            cache.commit(range(len(chunk)))
            for row in logits[:, : runner.info.vocab_size].double() / temperature:
                yield row.softmax(-1).numpy()
    finally:
        cache.free()


def measure(config: Config, temperature: float) -> dict[str, list[list[float]]]:
    """Per rule the chances at each place of each text."""
    plan = TextPlan(
        model=str(prepared_model(config.target, say)), max_tokens=config.max_tokens, temperature=temperature
    )
    target = target_runner(plan, Machine())
    drafter = target_runner(TextPlan(model=str(config.drafter)), Machine())
    prompts = read_prompts(config, config.num_prompts, over_categories=True).values()
    asked = [(encode(target.loaded.tokenizer, prompt), plan.params(number)) for number, prompt in enumerate(prompts)]
    found: dict[str, list[list[float]]] = {"together": [], "apart": []}
    for index, answer in RecordedTarget(target, 0).answers(asked, 8, lambda: None):
        pairs = [
            (together(p, q), apart(p, q))
            for p, q in zip(
                laws(target, asked[index][0], answer.output_token_ids, temperature),
                laws(drafter, asked[index][0], answer.output_token_ids, temperature),
                strict=True,
            )
        ]
        found["together"].append([ours for ours, _ in pairs])
        found["apart"].append([theirs for _, theirs in pairs])
        say(f"temperature {temperature}: {len(found['apart'])} of {len(asked)} texts")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    rows: list[tuple[object, ...]] = []
    for temperature in TEMPERATURES:
        found = measure(config, temperature)
        first = {rule: float(np.mean([chance for one in chances for chance in one])) for rule, chances in found.items()}
        per_round = {rule: [tokens_per_round(chances, length) for length in LENGTHS] for rule, chances in found.items()}
        rows.append(
            (
                temperature,
                *(f"{first[rule]:.3f}" for rule in ("together", "apart")),
                f"{first['together'] / first['apart']:.3f}",
                *(
                    f"{ours:.3f} / {theirs:.3f} = {ours / theirs:.3f}"
                    for ours, theirs in zip(per_round["together"], per_round["apart"], strict=True)
                ),
            )
        )
    header = (
        *("temperature", "accepted, ours", "accepted, speculative sampling", "ours of theirs"),
        *(f"tokens per round at K = {length}, ours / theirs" for length in LENGTHS),
    )
    facts = {"prompts": config.num_prompts, "max_tokens": config.max_tokens}
    BENCH.publish(config, Table(header, rows), facts, argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
