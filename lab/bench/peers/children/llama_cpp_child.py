"""llama.cpp by its Python binding: the 4-bit GGUF and one of 16 bits, each plain and with prompt lookup."""

from __future__ import annotations

import sys
import time
from typing import Any

import llama_cpp
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from lab.bench.peers.children.lines import Clock, StreamedAnswer, serve

CONTEXT = 2048
PROMPT_LOOKUP_TOKENS = 10


def main(folder: str, threads: int) -> None:
    made: dict[str, Llama] = {}

    def model(variant: str) -> Llama:
        if variant not in made:
            precision, _, drafting = variant.partition("_")
            made[variant] = Llama(
                f"{folder}/{precision}.gguf",
                n_ctx=CONTEXT,
                n_threads=threads,
                n_threads_batch=threads,
                # Without it the binding keeps logits of one batch only, and fails on a longer prompt when it drafts.
                logits_all=bool(drafting),
                draft_model=LlamaPromptLookupDecoding(num_pred_tokens=PROMPT_LOOKUP_TOKENS) if drafting else None,
                verbose=False,
            )
        return made[variant]

    def answer(request: dict[str, Any]) -> list[StreamedAnswer]:
        return [one(model(request["variant"]), request, prompt) for prompt in request["prompts"]]

    serve(answer, versions={"llama-cpp-python": llama_cpp.__version__})


def one(model: Llama, request: dict[str, Any], prompt: list[int]) -> StreamedAnswer:
    # The cache of the prompt before would be reused where it begins alike.
    model.reset()
    clock = Clock(time.perf_counter())
    token_ids: list[int] = []
    for token_id in model.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
        clock.tick()
        token_ids.append(token_id)
        if token_id in request["stop_token_ids"] or len(token_ids) >= request["max_tokens"]:
            break
    return clock.answer(token_ids)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
