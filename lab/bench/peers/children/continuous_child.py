"""transformers' continuous batching: what `generate_batch` does, with a manager that stays from turn to turn."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from lab.bench.peers.children.lines import StreamedAnswer, serve

PAGE_SIZE, PAGES = 256, 128
"""Room for 16 requests of 2,048 tokens. Left alone, the cache takes most of the machine's memory at each start."""
MAX_BATCH_TOKENS = 2048
RESULT_TIMEOUT_S = 1.0


def main(folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ends = model.generation_config.eos_token_id
    config = GenerationConfig(do_sample=False, eos_token_id=ends, pad_token_id=model.generation_config.pad_token_id)
    # Blocks of one prompt are not taken for the next: the others compute a prompt anew too.
    sizes = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=PAGES, max_batch_tokens=MAX_BATCH_TOKENS, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=sizes)
    manager.start()

    def answer(request: dict[str, Any]) -> list[StreamedAnswer]:
        started = time.perf_counter()
        asked = manager.add_requests(request["prompts"], max_new_tokens=request["max_tokens"], record_timestamps=True)
        done: dict[str, StreamedAnswer] = {}
        while len(done) < len(asked):
            result = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            if not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            times = result.timestamps
            done[result.request_id] = {
                "token_ids": result.generated_tokens,
                "first_s": times[0] - started,
                "total_s": times[-1] - started,
            }
        return [done[name] for name in asked]

    serve(answer, versions={"transformers": transformers.__version__, "torch": torch.__version__})
    manager.stop(block=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
