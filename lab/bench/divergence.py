"""How far each way to compute a bfloat16 model lies from its float32 original, in numbers and in tokens.

    python -m bench.divergence --model PATH [--max-tokens 60]

The repository's own prompts, each with the float32 model's greedy answer; every way computes the logits of all their
tokens: transformers' modules, our pass by torch, our pass by compiled kernels. Divergence is the mean of KL(float32 ||
way) over tokens, in nats.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lab.bench.driving.prompts import OWN
from lab.bench.report import publish
from moot.commands.common import say
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model

HEADER = ("way", "mean divergence", "99 of 100 below", "relative error of the logits", "same likeliest token")


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


def draw(figure: Any, found: Mapping[str, Mapping[str, float]]) -> None:
    axes = figure.subplots()
    axes.bar(list(found), [one["divergence"] for one in found.values()])
    axes.set(ylabel="mean divergence from float32, nats")


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=60)
    given = parser.parse_args()
    tokenizer = load_model(given.model, dtype="bfloat16").tokenizer
    original = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    texts: list[list[int]] = []
    for index, prompt in enumerate(OWN.values(), start=1):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        answer = original.generate(
            torch.tensor([ids]), max_new_tokens=given.max_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        texts.append(answer[0].tolist())
        say(f"answers {index}/{len(OWN)}")
    truth = by_transformers(original, texts)
    del original
    rounded = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    found = {"transformers": compare(by_transformers(rounded, texts), truth)}
    del rounded
    for name, kernels in (("our pass by torch", False), ("our pass by kernels", True)):
        found[name] = compare(by_us(given.model, texts, kernels), truth)
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
    tokens = sum(len(ids) for ids in texts)
    publish("divergence", HEADER, rows, {"found": found, "tokens": tokens}, lambda figure: draw(figure, found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
