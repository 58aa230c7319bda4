"""How far each way to compute a bfloat16 model lies from its float32 original, in numbers and in tokens.

    python -m lab.bench.divergence --model PATH [--max-tokens 60]

The repository's own prompts, each with the float32 model's greedy answer; every way computes the logits of all their
tokens: transformers' modules, our pass by torch, our pass by compiled kernels. Divergence is the mean of KL(float32 ||
way) over tokens, in nats.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lab.bench.harness.pages import Bench, BenchConfig, Table
from lab.bench.harness.prompts import OWN
from moot.commands.common import say
from moot.config import option
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model

BENCH = Bench("divergence", __doc__, measures=("moot/model",))
HEADER = ("way", "mean divergence", "99 of 100 below", "relative error of the logits", "same likeliest token")


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    model: str = option(help="folder of a model")
    max_tokens: int = option(60, help="longest answer, in tokens")


def by_transformers(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    return [model(torch.tensor([ids])).logits[0].float() for ids in texts]


def by_us(path: str, texts: Sequence[Sequence[int]], kernels: bool) -> list[Tensor]:
    loaded = load_model(path, dtype="bfloat16", native=kernels)
    runner = plain_runner(loaded, 4096, True)
    found = []
    for ids in texts:
        cache = runner.new_cache()
        found += runner.forward([SequenceInput(cache, list(ids), None, range(len(ids)))])
        cache.free()
    return found


def compare(found: Sequence[Tensor], truth: Sequence[Tensor]) -> dict[str, float]:
    """Logits [tokens, vocab] per text; of both the vocabulary of `truth` counts."""
    ours = torch.cat([logits[:, : true.shape[1]] for logits, true in zip(found, truth, strict=True)])
    true = torch.cat(list(truth))
    each = functional.kl_div(ours.log_softmax(-1), true.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return {
        "divergence": float(each.mean()),
        "divergence_p99": float(each.quantile(0.99)),
        "error": float((ours - true).norm() / true.norm()),
        "agreement": float((ours.argmax(-1) == true.argmax(-1)).float().mean()),
    }


def answers(original: Any, path: str, max_tokens: int) -> list[list[int]]:
    """Ids of each prompt with the float32 model's greedy answer."""
    tokenizer = load_model(path, dtype="bfloat16").tokenizer
    texts: list[list[int]] = []
    for index, prompt in enumerate(OWN.values(), start=1):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)[
            "input_ids"
        ]
        answer = original.generate(
            torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        texts.append(answer[0].tolist())
        say(f"answers {index}/{len(OWN)}")
    return texts


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    original = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).eval()
    texts = answers(original, config.model, config.max_tokens)
    truth = by_transformers(original, texts)
    del original
    rounded = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16).eval()
    found = {"transformers": compare(by_transformers(rounded, texts), truth)}
    del rounded
    for name, kernels in (("our pass by torch", False), ("our pass by kernels", True)):
        found[name] = compare(by_us(config.model, texts, kernels), truth)
        say(f"{name}: {found[name]['divergence']:.5f}")
    rows = [
        (
            name,
            f"{one['divergence']:.5f}",
            f"{one['divergence_p99']:.4f}",
            f"{one['error']:.4f}",
            f"{100 * one['agreement']:.1f} %",
        )
        for name, one in found.items()
    ]
    facts = {"found": found, "tokens": sum(map(len, texts))}
    BENCH.publish(config, Table(HEADER, rows), facts, HEADER[1], argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
