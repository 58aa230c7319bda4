"""transformers' `generate`: plain, with prompt lookup, and assisted by a draft model."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from lab.bench.peers.children.lines import Clock, StreamedAnswer, serve

PROMPT_LOOKUP_TOKENS = 10


class FirstToken(BaseStreamer):
    """The first `put` brings the prompt, the second the first token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts > 1:
            self._clock.tick()

    def end(self) -> None:
        pass


def main(folder: str, threads: int, assistant: str) -> None:
    torch.set_num_threads(threads)
    model, draft = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16).eval() for each in (folder, assistant)
    )
    speculation: dict[str, dict[str, Any]] = {
        "prompt_lookup": {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS},
        "assistant": {"assistant_model": draft},
    }

    def answer(request: dict[str, Any]) -> list[StreamedAnswer]:
        extra = speculation.get(request["variant"], {})
        return [one(model, request, prompt, extra) for prompt in request["prompts"]]

    serve(answer, versions={"transformers": transformers.__version__, "torch": torch.__version__})


def one(model: Any, request: dict[str, Any], prompt: list[int], extra: dict[str, Any]) -> StreamedAnswer:
    clock = Clock(time.perf_counter())
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            eos_token_id=request["stop_token_ids"],
            pad_token_id=request["stop_token_ids"][0],
            streamer=FirstToken(clock),
            **extra,
        )
    return clock.answer(out[0, len(prompt) :].tolist())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
