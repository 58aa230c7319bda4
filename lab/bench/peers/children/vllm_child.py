"""vLLM's engine on the CPU, in this process, plain or with its n-gram speculation (the third argument)."""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}

from lab.bench.peers.children.lines import Clock, StreamedAnswer, serve

NUM_SPECULATIVE_TOKENS = 5
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


def main(folder: str, threads: int, mode: str) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    # No prefix cache: a prompt asked before must be computed again, as the others compute it.
    model = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        speculative_config=NGRAM if mode == "ngram" else None,
    )
    engine = model.llm_engine
    names = (str(number) for number in itertools.count())

    def answer(request: dict[str, Any]) -> list[StreamedAnswer]:
        params = SamplingParams(
            temperature=0, max_tokens=request["max_tokens"], stop_token_ids=request["stop_token_ids"], detokenize=False
        )
        started = time.perf_counter()
        asked = [next(names) for _ in request["prompts"]]
        for name, prompt in zip(asked, request["prompts"], strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        clocks = {name: Clock(started) for name in asked}
        done: dict[str, StreamedAnswer] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                token_ids = output.outputs[0].token_ids
                name = output.request_id
                if token_ids:
                    clocks[name].tick()
                if output.finished:
                    done[name] = clocks[name].answer(token_ids)
        return [done[name] for name in asked]

    serve(answer, versions={"vllm": vllm.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
